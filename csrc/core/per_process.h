// State that a process keeps for itself: a child that was forked starts with its own, whatever the
// parent's threads were doing with theirs. Never destroyed: threads may use it until the end.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/fork.h"

namespace tensorizer {

template <class T>
class PerProcess {
 public:
  constexpr PerProcess() noexcept = default;

  // Of the calling process, made when first asked for. Safe from many threads; T locks itself.
  T& get() {
    const uint64_t now = fork_generation();
    Node* node = current_.load(std::memory_order_acquire);
    while (node == nullptr || node->made_in != now) {
      Node* fresh = new Node{now, {}};
      // What was there belongs to a parent, whose locks may be held: it is left alone.
      if (current_.compare_exchange_strong(node, fresh, std::memory_order_acq_rel))
        return fresh->value;
      delete fresh;
    }
    return node->value;
  }

 private:
  struct Node {
    const uint64_t made_in;
    T value;
  };
  std::atomic<Node*> current_{nullptr};
};

}  // namespace tensorizer
