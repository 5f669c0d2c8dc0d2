#include "format/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>

#include "core/checked_math.h"
#include "core/endian.h"
#include "core/error.h"
#include "format/dtype.h"
#include "format/prologue.h"
#include "format/tensor_path.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

constexpr std::string_view kMetadataName = "__metadata__";
constexpr uint64_t kMinHeaderNbytes = 2;  // {}

[[noreturn]] void fail(std::string_view name, const std::string& problem) {
  throw Error(Errc::malformed, "safetensors header: tensor " + display_name(name) + ": " + problem);
}

class HeaderParser {
 public:
  HeaderParser(std::span<char> text, uint64_t start, uint64_t source_nbytes)
      : json_(text, "safetensors header", start + kSafetensorsLengthNbytes),
        payloads_at_(start + kSafetensorsLengthNbytes + text.size()),
        source_nbytes_(source_nbytes) {}

  void parse() {
    bool metadata_seen = false;
    json_.object("the header", [&](std::string_view name) {
      if (name != kMetadataName) return parse_tensor(name);
      if (metadata_seen) json_.fail("__metadata__ occurs twice");
      metadata_seen = true;
      if (!json_.take_null()) metadata = read_text_object(json_, "__metadata__");
    });
    json_.finish();
    check_names();
    place_shapes();
    check_extents();
  }

  std::vector<uint64_t> dims;
  std::vector<IndexEntry> entries;
  Metadata metadata;

 private:
  void parse_tensor(std::string_view name) {
    IndexEntry entry;
    entry.name = name;
    std::optional<std::string_view> dtype;
    bool shape = false;
    std::optional<std::array<uint64_t, 2>> offsets;
    first_dims_.push_back(dims.size());
    const auto once = [&](bool seen, std::string_view member) {
      if (seen) fail(name, std::string(member) + " occurs twice");
    };
    if (!json_.next_is('{')) fail(name, "expected '{', an object");
    json_.object("a tensor", [&](std::string_view member) {
      if (member == "dtype") {
        once(dtype.has_value(), member);
        dtype = json_.string(member);
      } else if (member == "shape") {
        once(shape, member);
        shape = true;
        json_.array(member, [&] { dims.push_back(json_.integer(member)); });
      } else if (member == "data_offsets") {
        once(offsets.has_value(), member);
        offsets = parse_offsets();
      } else {
        json_.skip_value();
      }
    });
    if (!dtype) fail(name, "it has no dtype");
    if (!shape) fail(name, "it has no shape");
    if (!offsets) fail(name, "it has no data_offsets");
    entry.container_dtype = *dtype;
    // Positions behind the header until they are checked.
    entry.offset = (*offsets)[0];
    entry.data_offset = (*offsets)[1];
    check_size(entry);
    entries.push_back(entry);
  }

  std::array<uint64_t, 2> parse_offsets() {
    std::array<uint64_t, 2> offsets{};
    size_t count = 0;
    json_.array("data_offsets", [&] {
      const uint64_t value = json_.integer("data_offsets");
      if (count < offsets.size()) offsets[count] = value;
      ++count;
    });
    if (count != offsets.size())
      json_.fail("data_offsets: expected two numbers, got " + std::to_string(count));
    return offsets;
  }

  // Shape and type against the number of bytes; the tensor's own shape, where a type is packed.
  void check_size(IndexEntry& entry) {
    const uint64_t begin = entry.offset, end = entry.data_offset;
    if (end < begin)
      fail(entry.name, "its data ends at " + std::to_string(end) + ", before it begins at " +
                           std::to_string(begin));
    entry.data_nbytes = end - begin;
    entry.loaded_nbytes = entry.data_nbytes;
    const SafetensorsDtype* dtype = find_safetensors_dtype(entry.container_dtype);
    if (dtype == nullptr) return;
    const std::span<uint64_t> shape = std::span(dims).subspan(first_dims_.back());
    const uint64_t nbytes = nbytes_of(entry.name, shape, *dtype);
    if (nbytes != entry.data_nbytes)
      fail(entry.name, "its shape and dtype want " + std::to_string(nbytes) +
                           " bytes, its data has " + std::to_string(entry.data_nbytes));
    if (dtype->packed() > 1) {
      if (shape.empty() || shape.back() % dtype->packed() != 0) return;
      shape.back() /= dtype->packed();
    }
    entry.dtype = dtype->stored;
    entry.itemsize = dtype->bits < 8 ? 1 : dtype->bits / 8;
  }

  // Non-zero dimensions are limited even where another one is zero: no tensor has such a shape.
  static uint64_t nbytes_of(std::string_view name, std::span<const uint64_t> shape,
                            const SafetensorsDtype& dtype) {
    uint64_t bits = dtype.bits;
    bool empty = false;
    for (const uint64_t dim : shape) {
      empty = empty || dim == 0;
      const auto product = dim == 0 ? bits : checked_mul(bits, dim);
      if (!product) fail(name, "its shape is too large: 2^61 bytes or more");
      bits = *product;
    }
    if (empty) return 0;
    if (bits % 8 != 0) fail(name, "its " + std::to_string(bits) + " bits do not fill whole bytes");
    return bits / 8;
  }

  void check_names() {
    std::vector<std::string_view> names;
    names.reserve(entries.size());
    for (const IndexEntry& entry : entries) names.push_back(entry.name);
    if (const auto twice = find_duplicate(names)) fail(*twice, "the name occurs twice");
  }

  void place_shapes() {
    first_dims_.push_back(dims.size());
    for (size_t i = 0; i < entries.size(); ++i)
      entries[i].shape =
          std::span(dims).subspan(first_dims_[i], first_dims_[i + 1] - first_dims_[i]);
  }

  // Payloads follow each other from the header's end to the source's.
  void check_extents() {
    const auto earlier = [](const IndexEntry& a, const IndexEntry& b) {
      return a.offset != b.offset ? a.offset < b.offset : a.data_offset < b.data_offset;
    };
    if (!std::ranges::is_sorted(entries, earlier)) std::ranges::stable_sort(entries, earlier);
    uint64_t previous_end = 0;
    for (IndexEntry& entry : entries) {
      const uint64_t begin = entry.offset, end = entry.data_offset;
      if (begin != previous_end)
        fail(entry.name, "its data begins at " + std::to_string(begin) + ", expected " +
                             std::to_string(previous_end) + ", where what precedes it ends");
      if (end > kMaxNbytes - std::min(payloads_at_, kMaxNbytes))
        fail(entry.name, "its data ends at " + std::to_string(end) + ", which no file reaches");
      previous_end = end;
      entry.offset = entry.data_offset = payloads_at_ + begin;
    }
    check_end(payloads_at_ + previous_end);
  }

  void check_end(uint64_t wanted) const {
    if (source_nbytes_ == std::numeric_limits<uint64_t>::max() || source_nbytes_ == wanted) return;
    const bool cut = source_nbytes_ < wanted;
    throw Error(cut ? Errc::truncated : Errc::malformed,
                "the header wants the file to end at byte " + std::to_string(wanted) +
                    ", it ends at byte " + std::to_string(source_nbytes_) +
                    (cut ? ": it is cut off" : ": something follows"),
                {}, std::min(wanted, source_nbytes_));
  }

  JsonReader json_;
  uint64_t payloads_at_;
  uint64_t source_nbytes_;
  std::vector<size_t> first_dims_;  // per entry in the header's order, into dims
};

}  // namespace

std::optional<uint64_t> safetensors_header_nbytes(std::span<const std::byte> head) noexcept {
  if (head.size() < kSafetensorsLengthNbytes) return std::nullopt;
  const auto nbytes = load_le<uint64_t>(head.data());
  const bool brace =
      head.size() > kSafetensorsLengthNbytes && head[kSafetensorsLengthNbytes] == std::byte{'{'};
  const bool possible = nbytes >= kMinHeaderNbytes && nbytes <= kMaxSafetensorsHeaderNbytes;
  if (!brace && !possible) return std::nullopt;
  return nbytes;
}

void check_safetensors_length(uint64_t header_nbytes, uint64_t start, uint64_t source_nbytes) {
  if (header_nbytes > kMaxSafetensorsHeaderNbytes)
    throw Error(Errc::malformed,
                "a safetensors header of " + std::to_string(header_nbytes) + " bytes, at most " +
                    std::to_string(kMaxSafetensorsHeaderNbytes) + " are legal",
                {}, start);
  const uint64_t at = start + kSafetensorsLengthNbytes;
  if (at > source_nbytes || header_nbytes > source_nbytes - at)
    throw Error(Errc::truncated,
                "the safetensors header wants " + std::to_string(header_nbytes) +
                    " bytes at byte " + std::to_string(at) + ", the file ends at byte " +
                    std::to_string(source_nbytes),
                {}, at);
}

SafetensorsHeader parse_safetensors(std::vector<std::byte> header, uint64_t start,
                                    uint64_t source_nbytes) {
  HeaderParser parser({reinterpret_cast<char*>(header.data()), header.size()}, start,
                      source_nbytes);
  parser.parse();
  return {Index(std::move(header), std::move(parser.dims), std::move(parser.entries)),
          std::move(parser.metadata)};
}

std::string why_not_loadable(const IndexEntry& entry) {
  const std::string dtype = "dtype " + display_name(entry.container_dtype);
  const SafetensorsDtype* known = find_safetensors_dtype(entry.container_dtype);
  if (known == nullptr) return dtype + " is not known";
  if (known->stored.empty()) return dtype + ": no tensor has this type";
  return dtype + ": two elements share a byte, so the last dimension must be even";
}

namespace {

[[noreturn]] void refuse(std::string_view name, const std::string& problem,
                         Errc code = Errc::invalid_argument) {
  throw Error(code, "tensor " + display_name(name) + ": " + problem);
}

const SafetensorsDtype& dtype_of(const SafetensorsTensor& tensor) {
  const SafetensorsDtype* dtype = find_safetensors_dtype(tensor.dtype);
  if (dtype == nullptr) dtype = safetensors_dtype_of(tensor.dtype);
  if (dtype == nullptr)
    refuse(tensor.name, "safetensors have no name for dtype " + display_name(tensor.dtype));
  return *dtype;
}

void append_shape(std::string& out, const SafetensorsTensor& tensor,
                  const SafetensorsDtype& dtype) {
  // A type without a tensor type is given with the shape that the header shows.
  const uint64_t packed = find_safetensors_dtype(tensor.dtype) != nullptr ? 1 : dtype.packed();
  if (packed > 1 && tensor.shape.empty())
    refuse(tensor.name, "a packed type wants at least one dimension");
  uint64_t bits = dtype.bits;
  out.push_back('[');
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    uint64_t dim = tensor.shape[i];
    if (i + 1 == tensor.shape.size()) {
      const auto doubled = checked_mul(dim, packed);
      if (!doubled) refuse(tensor.name, "its shape is too large");
      dim = *doubled;
    }
    const auto product = checked_mul(bits, dim);
    if (!product) refuse(tensor.name, "its shape is too large");
    bits = *product;
    if (i > 0) out.push_back(',');
    out += std::to_string(dim);
  }
  out.push_back(']');
  if (bits % 8 != 0 || bits / 8 != tensor.nbytes)
    refuse(tensor.name, "its shape and dtype want " + std::to_string(bits) +
                            " bits, its data has " + std::to_string(tensor.nbytes) + " bytes");
}

void check_writable_names(std::span<const SafetensorsTensor> tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.name == kMetadataName) refuse(tensor.name, "safetensors reserve this name");
    if (!is_utf8(tensor.name)) refuse(tensor.name, "its name is not UTF-8");
    names.push_back(tensor.name);
  }
  if (const auto twice = find_duplicate(names)) refuse(*twice, "the name occurs twice");
}

}  // namespace

std::vector<uint32_t> canonical_order(std::span<const SafetensorsTensor> tensors) {
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::vector<const SafetensorsDtype*> ranks;  // rows of the table, which is in canonical order
  ranks.reserve(tensors.size());
  for (const SafetensorsTensor& tensor : tensors) ranks.push_back(&dtype_of(tensor));
  std::ranges::sort(order, [&](uint32_t a, uint32_t b) {
    return ranks[a] != ranks[b] ? ranks[a] < ranks[b] : tensors[a].name < tensors[b].name;
  });
  return order;
}

std::vector<std::byte> serialize_safetensors(std::span<const SafetensorsTensor> tensors,
                                             const Metadata& metadata) {
  check_writable_names(tensors);
  std::string text = "{";
  if (metadata) {
    append_json_string(text, kMetadataName);
    text.push_back(':');
    append_text_object(text, *metadata);
  }
  uint64_t end = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const SafetensorsDtype& dtype = dtype_of(tensor);
    if (text.size() > 1) text.push_back(',');
    append_json_string(text, tensor.name);
    text += ":{\"dtype\":";
    append_json_string(text, dtype.name);
    text += ",\"shape\":";
    append_shape(text, tensor, dtype);
    text += ",\"data_offsets\":[";
    text += std::to_string(end);
    text.push_back(',');
    const auto next = checked_add(end, tensor.nbytes);
    if (!next || *next > kMaxNbytes)
      refuse(tensor.name, "the tensors are larger than a file can be");
    end = *next;
    text += std::to_string(end);
    text += "]}";
  }
  text.push_back('}');
  text.resize(align_up(text.size(), 8), ' ');
  if (text.size() > kMaxSafetensorsHeaderNbytes)
    throw Error(Errc::out_of_range, "a safetensors header of " + std::to_string(text.size()) +
                                        " bytes, at most " +
                                        std::to_string(kMaxSafetensorsHeaderNbytes) + " are legal");
  std::vector<std::byte> bytes(kSafetensorsLengthNbytes + text.size());
  store_le(bytes.data(), uint64_t{text.size()});
  std::memcpy(bytes.data() + kSafetensorsLengthNbytes, text.data(), text.size());
  return bytes;
}

ShardIndex parse_shard_index(std::span<char> text) {
  if (text.size() > kMaxShardIndexNbytes)
    throw Error(Errc::malformed, "shard index: " + std::to_string(text.size()) +
                                     " bytes, at most " + std::to_string(kMaxShardIndexNbytes) +
                                     " are legal");
  JsonReader json(text, "shard index", 0);
  ShardIndex index;
  bool map_seen = false, metadata_seen = false;
  json.object("the index", [&](std::string_view member) {
    if (member == "weight_map") {
      if (map_seen) json.fail("weight_map occurs twice");
      map_seen = true;
      index.weight_map = read_text_object(json, "weight_map");
    } else if (member == "metadata" && !json.take_null()) {
      if (metadata_seen) json.fail("metadata occurs twice");
      metadata_seen = true;
      json.object("metadata", [&](std::string_view key) {
        if (json.next_is('"')) {
          index.metadata.push_back({key, json.string("metadata")});
        } else {
          json.skip_value();
        }
      });
    } else if (member != "metadata") {
      json.skip_value();
    }
  });
  json.finish();
  if (!map_seen) json.fail("it has no weight_map");
  return index;
}

namespace {

bool begins_with_magic(std::span<const std::byte> head) noexcept {
  const size_t nbytes = std::min(head.size(), kMagic.size());
  return std::ranges::equal(head.first(nbytes), std::span(kMagic).first(nbytes));
}

}  // namespace

Container detect_container(std::span<const std::byte> head, uint64_t origin) {
  if (begins_with_magic(head)) return Container::tensors;
  if (head.size() < kSafetensorsLengthNbytes)
    throw Error(Errc::truncated,
                "not a tensors file: " + std::to_string(head.size()) +
                    " bytes, where the magic |TZR| or the header length of a safetensors file "
                    "(8 bytes) begins",
                {}, origin);
  return safetensors_header_nbytes(head) ? Container::safetensors : Container::tensors;
}

}  // namespace tensorizer::format
