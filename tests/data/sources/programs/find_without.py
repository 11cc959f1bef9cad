"""Finds the files of a URL where a package is not installed.

python find_without.py PACKAGE URL FIELD
"""

import sys

from jtrain.data.sources.storage import find_files

package, url, field = sys.argv[1:]
sys.modules[package] = None  # pyright: ignore[reportArgumentType]
find_files(url, field=field)
