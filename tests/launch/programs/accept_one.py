"""Listens on port 7000, prints `up`, and ends when somebody has connected."""

import socket

server = socket.create_server(("", 7000))
print("up", flush=True)
server.accept()
