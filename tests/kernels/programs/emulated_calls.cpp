// Calls functions of a library of CPU kernels for somebody who cannot load it: compiled for another kind of machine
// than the tests', this runs in an emulator and is told on standard input what to call with what.
//
//   emulated_calls LIBRARY
//
// Numbers are little-endian. A request:
//   i32 bytes of the name, the name
//   i32 buffers; of each: i64 bytes, i32 whether the caller wants it back, the bytes
//   i32 pointers; of each: i32 buffer, i32 offset in it, i32 the buffer (-1: none) whose address is put there
//   i32 arguments; of each: i32 kind (0 integer, 1 float, 2 address of a buffer), 8 bytes: i64, or f64, or i64 buffer
// The answer: i64 result, and the bytes of the buffers that are wanted back. A function that writes beyond a buffer ends
// the program with status 3.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if !defined(__aarch64__)
#error "the calling convention is that of 64-bit ARM"
#endif

namespace {

constexpr size_t kGuard = 64;
constexpr unsigned char kCanary = 0xA5;
constexpr size_t kIntegers = 16;
constexpr size_t kFloats = 4;

// Integers go to x0 to x7 and then to the stack, 8 bytes each, and floats to registers of their own, whatever their
// order among each other; a function takes those that it has arguments for.
typedef int64_t (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float);

struct Buffer {
  unsigned char* memory;
  int64_t size;
  bool is_wanted;
};

void fail(const std::string& message, int status) {
  fprintf(stderr, "%s\n", message.c_str());
  exit(status);
}

void take(void* to, size_t size) {
  if (size && fread(to, 1, size, stdin) != size) exit(0);  // the caller has gone
}

template <class T> T number() {
  T value;
  take(&value, sizeof value);
  return value;
}

void give(const void* from, size_t size) {
  if (size && fwrite(from, 1, size, stdout) != size) exit(0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("usage: emulated_calls LIBRARY", 2);
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror(), 2);
  for (;;) {
    std::string name(number<int32_t>(), 0);
    take(&name[0], name.size());
    std::vector<Buffer> buffers(number<int32_t>());
    for (Buffer& buffer : buffers) {
      buffer.size = number<int64_t>();
      buffer.is_wanted = number<int32_t>();
      const size_t whole = (buffer.size + 2 * kGuard) / kGuard * kGuard;
      buffer.memory = static_cast<unsigned char*>(aligned_alloc(kGuard, whole));
      memset(buffer.memory + buffer.size, kCanary, kGuard);
      take(buffer.memory, buffer.size);
    }
    for (int32_t left = number<int32_t>(); left; --left) {
      const int32_t in = number<int32_t>(), offset = number<int32_t>(), of = number<int32_t>();
      const void* address = of < 0 ? nullptr : buffers[of].memory;
      memcpy(buffers[in].memory + offset, &address, sizeof address);
    }
    int64_t x[kIntegers] = {};
    float v[kFloats] = {};
    size_t integers = 0, floats = 0;
    for (int32_t left = number<int32_t>(); left; --left) {
      const int32_t kind = number<int32_t>();
      if (kind == 1 ? floats == kFloats : integers == kIntegers) fail(name + ": too many arguments", 2);
      if (kind == 0) x[integers++] = number<int64_t>();
      if (kind == 1) v[floats++] = (float)number<double>();
      if (kind == 2) x[integers++] = (int64_t)buffers[number<int64_t>()].memory;
    }
    auto call = (function)dlsym(library, name.c_str());
    if (!call) fail(dlerror(), 2);
    const int64_t result = call(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
                                x[14], x[15], v[0], v[1], v[2], v[3]);
    give(&result, sizeof result);
    for (const Buffer& buffer : buffers) {
      for (size_t i = 0; i < kGuard; ++i)
        if (buffer.memory[buffer.size + i] != kCanary) fail(name + " wrote beyond a buffer", 3);
      if (buffer.is_wanted) give(buffer.memory, buffer.size);
      free(buffer.memory);
    }
    fflush(stdout);
  }
}
