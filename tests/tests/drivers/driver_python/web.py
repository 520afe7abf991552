"""A web server of one file that understands ranges. Says its port."""

import http.server
import sys
from pathlib import Path

CONTENT = Path(sys.argv[1]).read_bytes()


class Web(http.server.BaseHTTPRequestHandler):
    """HEAD, and GET with a range."""

    def do_HEAD(self):
        self.answer(200, len(CONTENT))

    def do_GET(self):
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = CONTENT[start : end + 1]
        self.answer(206, len(data), f"bytes {start}-{end}/{len(CONTENT)}")
        self.wfile.write(data)

    def answer(self, status, length, content_range=None):
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
print(server.server_port, flush=True)
server.serve_forever()
