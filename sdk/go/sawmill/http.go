// A file on a web server, as an io.ReaderAt. Not here: a cache, and a second try after a failed
// request: an error goes to the device's user.

package sawmill

import (
	"fmt"
	"io"
	"net/http"
)

// HTTPSource is an io.ReaderAt of a file on a web server, read by range requests.
type HTTPSource struct {
	URL  string
	Size int64 // bytes
}

// OpenHTTP asks a web server for the size of the file.
func OpenHTTP(url string) (*HTTPSource, error) {
	reply, err := http.Head(url)
	if err != nil {
		return nil, err
	}
	reply.Body.Close()
	if reply.StatusCode != http.StatusOK || reply.ContentLength < 0 {
		return nil, fmt.Errorf("%s: %s, %d bytes", url, reply.Status, reply.ContentLength)
	}
	return &HTTPSource{url, reply.ContentLength}, nil
}

// ReadAt fills p. At the end of the file it fills less and returns io.EOF.
func (h *HTTPSource) ReadAt(p []byte, off int64) (int, error) {
	if off >= h.Size || len(p) == 0 {
		return 0, io.EOF
	}
	request, err := http.NewRequest(http.MethodGet, h.URL, nil)
	if err != nil {
		return 0, err
	}
	part := p[:min(int64(len(p)), h.Size-off)]
	request.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+int64(len(part))-1))
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusPartialContent {
		return 0, fmt.Errorf("%s: %s to a range request", h.URL, reply.Status)
	}
	n, err := io.ReadFull(reply.Body, part)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}
