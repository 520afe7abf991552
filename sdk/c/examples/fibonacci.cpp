// fibonacci: a read-only disk of Fibonacci numbers of 8 bytes, modulo 2^64. A driver as a class.
#include <sawmill.h>

#include <cstring>
#include <iostream>
#include <vector>

class Fibonacci {
public:
    explicit Fibonacci(std::size_t bytes) : numbers(bytes / 8)
    {
        std::uint64_t a = 0, b = 1;
        for (auto &number : numbers) {
            number = a;
            a = b;
            b += number;
        }
    }

    int read(std::uint64_t offset, void *into, std::size_t length) const
    {
        std::memcpy(into, reinterpret_cast<const char *>(numbers.data()) + offset, length);
        return 0;
    }

private:
    std::vector<std::uint64_t> numbers;
};

extern "C" {
static int read_numbers(void *user, std::uint64_t offset, void *into, std::size_t length)
{
    return static_cast<const Fibonacci *>(user)->read(offset, into, length);
}

static void tell_doors(void *, const char *const *doors)
{
    for (; *doors != nullptr; ++doors)
        std::cout << *doors << std::endl;
}
}

int main()
{
    Fibonacci disk(1 << 20);
    sawmill_driver driver = {};
    driver.struct_bytes = sizeof driver;
    driver.read = read_numbers;
    driver.ready = tell_doors;
    const char *options[] = {"size=1048576", "threads=2", nullptr};
    if (sawmill_serve(&driver, &disk, options) < 0) {
        std::cerr << "fibonacci: " << sawmill_error() << '\n';
        return 1;
    }
}
