// The tree of paths as one hash table of (parent, component): no allocation per path.
#include <bit>
#include <cstring>
#include <random>

#include "core/error.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

// SipHash-1-3 under a key drawn at start: names come from files, and chosen collisions would make a
// table slow.
class SipHash {
 public:
  explicit SipHash(uint64_t tweak) noexcept {
    static const std::array<uint64_t, 2> key = draw_key();
    v_[0] = key[0] ^ 0x736f6d6570736575u;
    v_[1] = key[1] ^ 0x646f72616e646f6du;
    v_[2] = key[0] ^ 0x6c7967656e657261u;
    v_[3] = key[1] ^ 0x7465646279746573u;
    absorb(tweak);
  }

  uint64_t operator()(std::string_view text) noexcept {
    uint64_t last = static_cast<uint64_t>(text.size()) << 56;
    for (; text.size() >= 8; text.remove_prefix(8)) {
      uint64_t word;
      std::memcpy(&word, text.data(), sizeof word);
      absorb(word);
    }
    for (size_t i = 0; i < text.size(); ++i)
      last |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
    absorb(last);
    v_[2] ^= 0xff;
    for (int i = 0; i < 3; ++i) round();
    return v_[0] ^ v_[1] ^ v_[2] ^ v_[3];
  }

 private:
  static std::array<uint64_t, 2> draw_key() {
    std::random_device device;
    const auto word = [&device] { return uint64_t{device()} << 32 | device(); };
    return {word(), word()};
  }

  void absorb(uint64_t word) noexcept {
    v_[3] ^= word;
    round();
    v_[0] ^= word;
  }

  void round() noexcept {
    v_[0] += v_[1], v_[1] = std::rotl(v_[1], 13), v_[1] ^= v_[0], v_[0] = std::rotl(v_[0], 32);
    v_[2] += v_[3], v_[3] = std::rotl(v_[3], 16), v_[3] ^= v_[2];
    v_[0] += v_[3], v_[3] = std::rotl(v_[3], 21), v_[3] ^= v_[0];
    v_[2] += v_[1], v_[1] = std::rotl(v_[1], 17), v_[1] ^= v_[2], v_[2] = std::rotl(v_[2], 32);
  }

  std::array<uint64_t, 4> v_{};
};

struct Key {
  uint32_t parent;
  bool is_index;
  std::string_view text;
};

Key key_of(uint32_t parent, const PathComponent& component) noexcept {
  if (const auto* text = std::get_if<std::string>(&component)) return {parent, false, *text};
  return {parent, true, std::get<PathIndex>(component).digits};
}

constexpr uint32_t kRoot = 0;
constexpr uint32_t kNone = 0;  // the root is no one's child, so its number marks free slots

}  // namespace

struct PathRegistry::Impl {
  struct Node {
    uint64_t hash;
    size_t text_at;
    uint32_t text_nbytes;
    uint32_t parent;
    uint32_t child_count = 0;
    bool is_index;                      // a sequence position, not a mapping key
    bool is_leaf;                       // a tensor; fixed when the node is made
    bool children_are_indices = false;  // meaningful while child_count > 0
  };

  std::vector<Node> nodes{Node{0, 0, 0, 0, 0, false, false, false}};
  std::vector<uint32_t> slots =
      std::vector<uint32_t>(64, kNone);  // power of two, at most half full
  std::string texts;

  static uint64_t hash_of(const Key& key) noexcept {
    return SipHash(uint64_t{key.parent} << 1 | uint64_t{key.is_index})(key.text);
  }

  bool matches(uint32_t node, const Key& key, uint64_t hash) const noexcept {
    const Node& n = nodes[node];
    return n.hash == hash && n.parent == key.parent && n.is_index == key.is_index &&
           std::string_view(texts).substr(n.text_at, n.text_nbytes) == key.text;
  }

  uint32_t find(const Key& key, uint64_t hash) const noexcept {
    for (size_t slot = hash & (slots.size() - 1); slots[slot] != kNone;
         slot = (slot + 1) & (slots.size() - 1)) {
      if (matches(slots[slot], key, hash)) return slots[slot];
    }
    return kNone;
  }

  void place(uint32_t node) noexcept {
    size_t slot = nodes[node].hash & (slots.size() - 1);
    while (slots[slot] != kNone) slot = (slot + 1) & (slots.size() - 1);
    slots[slot] = node;
  }

  void resize_slots(size_t count) {
    std::vector<uint32_t>(std::bit_ceil(count), kNone).swap(slots);
    // In order of age, so that drop_last() only ever empties the end of a probe sequence.
    for (uint32_t node = 1; node < nodes.size(); ++node) place(node);
  }

  uint32_t insert(const Key& key, uint64_t hash, bool is_leaf) {
    if (nodes.size() >= UINT32_MAX) throw Error(Errc::malformed, "too many tensor names");
    if ((nodes.size() + 1) * 2 > slots.size()) resize_slots(slots.size() * 2);
    const auto node = static_cast<uint32_t>(nodes.size());
    nodes.push_back({hash, texts.size(), static_cast<uint32_t>(key.text.size()), key.parent, 0,
                     key.is_index, is_leaf, false});
    texts += key.text;
    place(node);
    Node& parent = nodes[key.parent];
    parent.children_are_indices = key.is_index;
    ++parent.child_count;
    return node;
  }

  void drop_last() noexcept {
    const auto node = static_cast<uint32_t>(nodes.size() - 1);
    size_t slot = nodes[node].hash & (slots.size() - 1);
    while (slots[slot] != node) slot = (slot + 1) & (slots.size() - 1);
    slots[slot] = kNone;
    --nodes[nodes[node].parent].child_count;
    texts.resize(nodes[node].text_at);
    nodes.pop_back();
  }

  bool layer_refuses(uint32_t parent, bool is_index) const noexcept {
    return nodes[parent].child_count > 0 && nodes[parent].children_are_indices != is_index;
  }
};

namespace {

constexpr const char* kDuplicate = " occurs twice";
constexpr const char* kBelowTensor = " goes through a path that is a tensor itself";
constexpr const char* kAboveTensors = " is also the beginning of other tensors' paths";
constexpr const char* kMixedKeys = " mixes string keys and sequence positions in one layer";

[[noreturn]] void refuse(bool caller, const std::string& shown, const char* problem) {
  throw Error(caller ? Errc::invalid_argument : Errc::malformed, "tensor name " + shown + problem);
}

}  // namespace

PathRegistry::PathRegistry() : impl_(std::make_unique<Impl>()) {}
PathRegistry::~PathRegistry() = default;
PathRegistry::PathRegistry(PathRegistry&&) noexcept = default;
PathRegistry& PathRegistry::operator=(PathRegistry&&) noexcept = default;

void PathRegistry::reserve(size_t count) {
  impl_->nodes.reserve(count + 1);
  if (count * 2 + 2 > impl_->slots.size()) impl_->resize_slots(count * 2 + 2);
}

void PathRegistry::add(const TensorPath& path) {
  Impl& tree = *impl_;
  const auto fail = [&](const char* problem) {
    refuse(caller_, display_name(encode_name(path)), problem);
  };
  if (path.empty()) throw Error(Errc::invalid_argument, "a tensor's path has no components");

  // 1. Walk what exists, and check everything before anything changes.
  uint32_t parent = kRoot;
  size_t depth = 0;
  for (; depth < path.size(); ++depth) {
    const Key key = key_of(parent, path[depth]);
    if (tree.layer_refuses(parent, key.is_index)) fail(kMixedKeys);
    const uint32_t child = tree.find(key, Impl::hash_of(key));
    if (child == kNone) break;
    const bool last = depth + 1 == path.size();
    if (last) fail(tree.nodes[child].is_leaf ? kDuplicate : kAboveTensors);
    if (tree.nodes[child].is_leaf) fail(kBelowTensor);
    parent = child;
  }
  // 2. The rest is new.
  for (; depth < path.size(); ++depth) {
    const Key key = key_of(parent, path[depth]);
    parent = tree.insert(key, Impl::hash_of(key), depth + 1 == path.size());
  }
}

void PathRegistry::add_plain(std::string_view name) {
  Impl& tree = *impl_;
  const Key key{kRoot, false, name};
  const uint64_t hash = Impl::hash_of(key);
  if (tree.layer_refuses(kRoot, false)) refuse(caller_, display_name(name), kMixedKeys);
  if (const uint32_t found = tree.find(key, hash); found != kNone) {
    refuse(caller_, display_name(name), tree.nodes[found].is_leaf ? kDuplicate : kAboveTensors);
  }
  tree.insert(key, hash, /*is_leaf=*/true);
}

size_t PathRegistry::mark() const noexcept { return impl_->nodes.size(); }

void PathRegistry::rollback(size_t mark) noexcept {
  while (impl_->nodes.size() > mark) impl_->drop_last();
}

}  // namespace tensorizer::format
