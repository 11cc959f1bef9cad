"""`python -m jtrain.generate`, and `generate.main` for notebooks: jtrain/cli/generate.py, by name."""

import pkgutil
import sys

main = pkgutil.resolve_name("jtrain.cli.generate:main")

if __name__ == "__main__":
    sys.exit(main())
