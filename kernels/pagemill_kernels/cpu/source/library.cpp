// What every object of this library shares: the threads that it works on, and who it is.
#include "batch.h"
#include "threads.h"

Runtime runtime;

// parallel, thread_number: GOMP_parallel and omp_get_thread_num of the loaded runtime, or null to use one thread.
EXPORT void pm_set_runtime(void* parallel, void* thread_number) {
  runtime.parallel = reinterpret_cast<parallel_fn>(parallel);
  runtime.thread_number = reinterpret_cast<number_fn>(thread_number);
}

EXPORT int32_t pm_lanes() { return LANES; }
