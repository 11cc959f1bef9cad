"""Prints the output of an XProf tool for a trace.

python run_xprof.py FILE TOOL
"""

import sys

from xprof.convert import raw_to_tool_data

content, _ = raw_to_tool_data.xspace_to_tool_data([sys.argv[1]], sys.argv[2], {})
sys.stdout.buffer.write(b"\n" + (content if isinstance(content, bytes) else content.encode()))
