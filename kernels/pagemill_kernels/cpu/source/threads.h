// Work on the threads of the OpenMP runtime that torch has loaded: a second runtime would bring a second set of threads
// for the same cores. Its entry point is given at start, so that this object needs no OpenMP compiler and links to none.
#pragma once

#include <atomic>
#include <cstdint>

typedef void (*parallel_fn)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*number_fn)();

struct Runtime {
  parallel_fn parallel = nullptr;
  number_fn thread_number = nullptr;
};
extern Runtime runtime;

// Calls body(thread) on up to `threads` threads, of which the caller is number 0, and waits for all.
template <class Body> void on_threads(int threads, Body& body) {
  if (threads <= 1 || !runtime.parallel) {
    body(0);
    return;
  }
  runtime.parallel([](void* data) { (*static_cast<Body*>(data))(runtime.thread_number()); }, &body, threads, 0);
}

// Calls item(index, following, thread) for all indices below count, each thread taking the next that is left. following
// is what the same thread will be given then, or -1.
template <class Item> void for_each_ahead(int threads, int64_t count, Item&& item) {
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    auto take = [&] {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      return index < count ? index : -1;
    };
    for (int64_t index = take(), following; index >= 0; index = following)
      following = take(), item(index, following, thread);
  };
  on_threads(count > 1 ? threads : 1, body);
}

// Calls item(index, thread) for all indices below count, each thread taking the next that is left.
template <class Item> void for_each(int threads, int64_t count, Item&& item) {
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) item(index, thread);
  };
  on_threads(count > 1 ? threads : 1, body);
}
