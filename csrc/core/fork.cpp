#include "core/fork.h"

#include <pthread.h>

namespace tensorizer {
namespace {

constinit std::atomic<uint64_t> generation{0};

[[maybe_unused]] const int counting =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(2, std::memory_order_relaxed); });

}  // namespace

uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace tensorizer
