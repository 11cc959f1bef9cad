"""`python -m jtrain.launch`, and `launch.main` for notebooks: jtrain/cli/launch.py, by name."""

import pkgutil
import sys

main = pkgutil.resolve_name("jtrain.cli.launch:main")

if __name__ == "__main__":
    sys.exit(main())
