// The golden files and the corpus of the repository. Outside of it a test is skipped; inside, one
// that finds no file fails, because it would pass without any.

package mockhost

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Vectors reads the golden packets of one folder of crates/driver/vectors, by their names without
// the ending. It skips the test where the module lies outside of the repository.
func Vectors(t testing.TB, folder string) map[string][]byte {
	t.Helper()
	packets := make(map[string][]byte)
	for name, packet := range files(t, "crates/driver/vectors/"+folder, "*.bin") {
		packets[strings.TrimSuffix(name, ".bin")] = packet
	}
	return packets
}

// files reads those files of a folder of the repository that match a pattern, by their names.
func files(t testing.TB, folder, pattern string) map[string][]byte {
	t.Helper()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	root := here
	for !isFolder(filepath.Join(root, "crates", "driver")) {
		above := filepath.Dir(root)
		if above == root {
			t.Skipf("%s is in Sawmill's repository, and %s is not in it", folder, here)
		}
		root = above
	}
	paths, err := filepath.Glob(filepath.Join(root, folder, pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files %s in %s of %s: %v", pattern, folder, root, err)
	}
	contents := make(map[string][]byte, len(paths))
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		contents[filepath.Base(path)] = content
	}
	return contents
}

func isFolder(path string) bool {
	about, err := os.Stat(path)
	return err == nil && about.IsDir()
}
