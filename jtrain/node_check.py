"""`python -m jtrain.node_check`, and `node_check.main` for notebooks: jtrain/cli/node_check.py, by name."""

import pkgutil
import sys

main = pkgutil.resolve_name("jtrain.cli.node_check:main")

if __name__ == "__main__":
    sys.exit(main())
