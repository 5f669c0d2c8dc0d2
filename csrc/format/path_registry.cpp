// The tree of paths as a hash table of (parent, component).
#include <sodium.h>

#include <array>
#include <cstring>
#include <memory_resource>
#include <random>
#include <unordered_map>

#include "format/tensor_path.h"

namespace tensorizer::format {

struct PathRegistry::Impl {
  struct Node {
    bool is_leaf = false;               // a tensor; fixed when the node is made
    bool children_are_indices = false;  // meaningful while child_count > 0
    uint32_t child_count = 0;
  };

  struct Key {
    Node* parent;
    bool is_index;  // a sequence position, not a mapping key
    std::string_view text;
    bool operator==(const Key&) const = default;
  };

  // SipHash under a key drawn at start: names come from files, and chosen collisions would make a
  // table slow.
  struct HashKey {
    size_t operator()(const Key& key) const {
      static const auto secret = [] {
        std::array<unsigned char, crypto_shorthash_KEYBYTES> drawn;
        std::random_device device;
        for (unsigned char& byte : drawn) byte = static_cast<unsigned char>(device());
        return drawn;
      }();
      uint64_t hash = 0;
      crypto_shorthash(reinterpret_cast<unsigned char*>(&hash),
                       reinterpret_cast<const unsigned char*>(key.text.data()), key.text.size(),
                       secret.data());
      return hash ^
             (reinterpret_cast<uintptr_t>(key.parent) + uintptr_t{key.is_index}) * 0x9E3779B1u;
    }
  };

  using Tree = std::pmr::unordered_map<Key, Node, HashKey>;

  static Key key_of(const PathComponent& component) noexcept {
    if (const auto* text = std::get_if<std::string>(&component)) return {nullptr, false, *text};
    return {nullptr, true, std::get<PathIndex>(component).digits};
  }

  std::pmr::monotonic_buffer_resource memory;  // of the nodes and their texts
  Tree tree{&memory};
  std::vector<const Key*> in_order;
  Node root;

  std::string_view copy(std::string_view text) {
    if (text.empty()) return {};
    auto* const place = static_cast<char*>(memory.allocate(text.size(), 1));
    std::memcpy(place, text.data(), text.size());
    return {place, text.size()};
  }

  // The child of `parent` that `key` names, made if it is not there; fail(problem) throws. What
  // fails has made nothing before: behind a new node all are new.
  template <class Fail>
  Node* step(Node* parent, Key key, bool is_last, const Fail& fail) {
    if (parent->child_count > 0 && parent->children_are_indices != key.is_index)
      fail(" mixes string keys and sequence positions in one layer");
    key.parent = parent;
    key.text = copy(key.text);
    const auto [found, is_new] = tree.try_emplace(key, Node{.is_leaf = is_last});
    Node* const child = &found->second;
    if (is_new) {
      in_order.push_back(&found->first);
      parent->children_are_indices = key.is_index;
      ++parent->child_count;
    } else if (is_last) {
      fail(child->is_leaf ? " occurs twice" : " is also the beginning of other tensors' paths");
    } else if (child->is_leaf) {
      fail(" goes through a path that is a tensor itself");
    }
    return child;
  }
};

PathRegistry::PathRegistry(Errc broken_rule)
    : impl_(std::make_unique<Impl>()), broken_rule_(broken_rule) {}
PathRegistry::~PathRegistry() = default;

void PathRegistry::reserve(size_t count) {
  impl_->tree.reserve(count);
  impl_->in_order.reserve(count);
}

void PathRegistry::refuse(std::string_view stored, const char* problem) const {
  throw Error(broken_rule_, "tensor name " + display_name(stored) + problem);
}

void PathRegistry::add(const TensorPath& path) {
  if (path.empty()) throw Error(Errc::invalid_argument, "a tensor's path has no components");
  Impl::Node* node = &impl_->root;
  for (const PathComponent& component : path)
    node = impl_->step(node, Impl::key_of(component), &component == &path.back(),
                       [&](const char* problem) { refuse(encode_name(path), problem); });
}

void PathRegistry::add_plain(std::string_view name) {
  impl_->step(&impl_->root, {nullptr, false, name}, true,
              [&](const char* problem) { refuse(name, problem); });
}

size_t PathRegistry::mark() const noexcept { return impl_->in_order.size(); }

void PathRegistry::rollback(size_t mark) noexcept {
  for (; impl_->in_order.size() > mark; impl_->in_order.pop_back()) {
    const Impl::Key key = *impl_->in_order.back();
    --key.parent->child_count;
    impl_->tree.erase(key);
  }
}

}  // namespace tensorizer::format
