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
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	root := here
	for !isFolder(filepath.Join(root, "crates", "driver")) {
		above := filepath.Dir(root)
		if above == root {
			t.Skipf("the golden packets are in Sawmill's repository, and %s is not in it", here)
		}
		root = above
	}
	files, err := filepath.Glob(filepath.Join(root, "crates/driver/vectors", folder, "*.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden packets of %s in %s: %v", folder, root, err)
	}
	packets := make(map[string][]byte, len(files))
	for _, file := range files {
		packet, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		packets[strings.TrimSuffix(filepath.Base(file), ".bin")] = packet
	}
	return packets
}

func isFolder(path string) bool {
	about, err := os.Stat(path)
	return err == nil && about.IsDir()
}
