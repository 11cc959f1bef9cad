"""`python -m jtrain.survey`: jtrain/cli/survey.py, by name."""

import pkgutil
import sys

main = pkgutil.resolve_name("jtrain.cli.survey:main")

if __name__ == "__main__":
    sys.exit(main())
