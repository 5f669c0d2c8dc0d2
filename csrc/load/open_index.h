// Opening a container: its head and index. Pure apart from one read each.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "format/annex.h"
#include "format/index.h"
#include "format/prologue.h"
#include "format/safetensors.h"
#include "format/ties.h"
#include "io/range_source.h"

namespace tensorizer::load {

// The first bytes of a container, and their content.
struct ContainerHead {
  uint64_t start = 0;  // position of the container in the source
  format::Container container = format::Container::tensors;
  // Of a safetensors file only the counters and the length of its header are set; its version is 0.
  format::Prologue prologue;
  std::vector<std::byte> bytes;  // from `start` on, as far as they were read

  // Bytes before the index, and the index itself.
  uint64_t index_at() const noexcept {
    return start + (container == format::Container::tensors ? format::kPrologueNbytes
                                                            : format::kSafetensorsLengthNbytes);
  }
  uint64_t index_nbytes() const noexcept { return prologue.metadata_nbytes; }
};

// Results of checking a file's tag and signatures (sign/authenticity).
struct Authenticated {
  bool by_key = false;                               // the tag is right
  std::vector<std::array<std::byte, 32>> signers{};  // public keys of signatures that are right
  // The digests that record headers must have; empty if neither was checked, nor the index digest
  // compared with one told elsewhere.
  std::vector<digest::Sha256Digest> records{};
};

// The parsed index of a container and its annex. Immutable after its tag and signatures were
// checked; shared by everything that loads from it.
struct OpenedIndex {
  OpenedIndex(const ContainerHead& head, format::Index i)
      : start(head.start), container(head.container), prologue(head.prologue), index(std::move(i)) {
    std::copy_n(head.bytes.begin(), std::min(head.bytes.size(), prologue_bytes.size()),
                prologue_bytes.begin());
  }

  // Whether records have a header in front of their payload, with digests and the rest.
  bool has_record_headers() const noexcept { return container == format::Container::tensors; }

  // Whether only stored hashes bind the data to the signed index: a part of a tensor cannot
  // be checked then.
  bool binds_data_by_digests() const noexcept {
    return !authenticated.signers.empty() && !prologue.has_crypt_info();
  }

  // Names: those of the entries, then those that only ties give.
  size_t name_count() const noexcept { return index.size() + unlisted.size(); }
  std::string_view name(size_t i) const noexcept {
    return i < index.size() ? index[i].name : ties[unlisted[i - index.size()]].alias;
  }
  // The entry that a name stands for.
  uint32_t target(size_t i) const noexcept;

  uint64_t start = 0;
  format::Container container;
  format::Prologue prologue;
  std::array<std::byte, format::kPrologueNbytes> prologue_bytes{};  // of a .tensors file
  format::Index index;
  std::optional<format::Annex> annex;  // of a .tensors file that has one
  format::Metadata metadata;           // in clear; borrows the index or the annex
  std::vector<format::Tie> ties;       // likewise
  std::vector<uint32_t> unlisted;      // ties whose alias is no entry
  Authenticated authenticated;
};

// Reads the first bytes of the container that starts at `start`. Throws Error: malformed,
// unsupported, truncated, crypto, io; the message names the source.
ContainerHead open_head(io::RangeSource& source, uint64_t start, format::KeyGiven key,
                        const std::stop_token& stop);

// Reads the index behind the head. Every length is compared with the source's size before it sizes
// memory. The caller checks tag and signatures (sign/authenticity). Throws as open_head.
std::shared_ptr<OpenedIndex> open_index(io::RangeSource& source, const ContainerHead& head,
                                        const std::stop_token& stop);

}  // namespace tensorizer::load
