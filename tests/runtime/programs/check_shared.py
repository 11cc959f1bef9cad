"""One of two processes that probe folders; prints the error of each folder, or an empty text.

python check_shared.py FOLDER...
"""

import json
import os
import sys
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.workdir_lock import check_shared

multihost.join_processes(os.environ)
multihost.process_count()
errors: list[str] = []
for folder in sys.argv[1:]:
    try:
        check_shared(Path(folder), patience_s=0.5)
        errors.append("")
    except UserError as error:
        errors.append(str(error))
print(json.dumps(errors))
