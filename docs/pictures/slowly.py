#!/usr/bin/python3
"""Passes a page on, and lets its load take some seconds: a browser that takes a picture when a page
has loaded then takes it of a page that has run for a while.

    slowly.py ADDRESS SECONDS      prints the address under which to ask; ends when its input ends

Everything but the page itself is passed on as it is. Not here: the browser (`dashboard.sh`).
"""

import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAUSE = "/pause"


def main():
    address, seconds = sys.argv[1].rstrip("/"), float(sys.argv[2])

    class Pass(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == PAUSE:
                time.sleep(seconds)
                kind, body = "image/gif", b""
            else:
                try:
                    with urllib.request.urlopen(address + self.path) as answer:
                        kind, body = answer.headers["Content-Type"], answer.read()
                except urllib.error.HTTPError as refused:
                    return self.send_error(refused.code)
            if self.path == "/":
                body = body.replace(b"</body>", b'<img hidden src="%s"></body>' % PAUSE.encode())
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pass)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    sys.stdin.read()


main()
