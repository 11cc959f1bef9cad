"""`python -m jtrain.explain`: jtrain/cli/explain.py, by name."""

import pkgutil
import sys

main = pkgutil.resolve_name("jtrain.cli.explain:main")

if __name__ == "__main__":
    sys.exit(main())
