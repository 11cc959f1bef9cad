"""Connects to a host's port, within 5 s.

python connect.py HOST PORT
"""

import socket
import sys

socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
