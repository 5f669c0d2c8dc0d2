#include "digest/digest.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <vector>

#include "digest/sha256_kernels.h"

namespace tensorizer::digest {
namespace {

// --- CRC-32 ---
//
// Polynomials over GF(2) modulo that of CRC-32, bits reflected: bit 31 is x^0.

constexpr uint32_t kPolynomial = 0xEDB88320;
constexpr uint32_t kOne = uint32_t{1} << 31;

constexpr uint32_t multiply(uint32_t a, uint32_t b) noexcept {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return product;
}

// kSquares[k] = x^(8 * 2^k): 2^k appended bytes multiply a CRC by it.
constexpr std::array<uint32_t, 64> kSquares = [] {
  std::array<uint32_t, 64> squares{};
  squares[0] = kOne >> 8;
  for (size_t k = 1; k < squares.size(); ++k) squares[k] = multiply(squares[k - 1], squares[k - 1]);
  return squares;
}();

// --- SHA-256 ---

constexpr std::array<uint32_t, 8> kInitialState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

}  // namespace

uint32_t crc32(uint32_t seed, std::span<const std::byte> bytes) noexcept {
  return crc32_gzip_refl(seed, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) noexcept {
  for (size_t k = 0; nbytes_b != 0; nbytes_b >>= 1, ++k) {
    if ((nbytes_b & 1) != 0) crc_a = multiply(kSquares[k], crc_a);
  }
  return crc_a ^ crc_b;
}

Sha256::Sha256() noexcept : state_(kInitialState) {}

void Sha256::absorb_blocks(const std::byte* data, size_t nblocks) noexcept {
  if (nblocks == 0) return;
  const BlockRun run{state_.data(), data, nblocks};
  sha256_kernel_here().widths.back().absorb(&run, 1, nblocks);
}

// Counts `bytes`, completes a block begun earlier, and returns the remaining bytes. There are some
// only if no block is begun any more.
std::span<const std::byte> Sha256::top_up(std::span<const std::byte> bytes) noexcept {
  const size_t buffered = total_nbytes_ % kSha256BlockNbytes;
  total_nbytes_ += bytes.size();
  if (buffered == 0) return bytes;
  const size_t taken = std::min(bytes.size(), kSha256BlockNbytes - buffered);
  std::copy_n(bytes.begin(), taken, buffer_.begin() + static_cast<std::ptrdiff_t>(buffered));
  if (buffered + taken == kSha256BlockNbytes) absorb_blocks(buffer_.data(), 1);
  return bytes.subspan(taken);
}

// Keeps the bytes that top_up() returned and that are less than a block.
void Sha256::keep_tail(std::span<const std::byte> bytes) noexcept {
  const auto tail = bytes.last(bytes.size() % kSha256BlockNbytes);
  std::copy(tail.begin(), tail.end(), buffer_.begin());
}

void Sha256::update(std::span<const std::byte> bytes) noexcept {
  const auto rest = top_up(bytes);
  absorb_blocks(rest.data(), rest.size() / kSha256BlockNbytes);
  keep_tail(rest);
}

void Sha256::update_all(std::span<Update> updates) {
  std::vector<BlockRun> runs;
  runs.reserve(updates.size());
  for (Update& update : updates) {
    Sha256& stream = *update.stream;
    update.bytes = stream.top_up(update.bytes);
    const size_t nblocks = update.bytes.size() / kSha256BlockNbytes;
    if (nblocks > 0) runs.push_back({stream.state_.data(), update.bytes.data(), nblocks});
  }
  absorb_all(sha256_kernel_here(), runs);
  for (const Update& update : updates) update.stream->keep_tail(update.bytes);
}

size_t Sha256::at_once(size_t ready) noexcept {
  return std::min(ready, sha256_kernel_here().width_for(ready).lanes);
}

size_t Sha256::lanes() noexcept { return sha256_kernel_here().widths.front().lanes; }

Sha256Digest Sha256::finish() noexcept {
  const uint64_t nbits = total_nbytes_ * 8;
  // One bit, zeros up to the last 8 bytes of a block, the length in bits.
  std::array<std::byte, 2 * kSha256BlockNbytes> padding{std::byte{0x80}};
  const size_t buffered = total_nbytes_ % kSha256BlockNbytes;
  const size_t zeros_end =
      (buffered < kSha256BlockNbytes - 8 ? 1 : 2) * kSha256BlockNbytes - 8 - buffered;
  for (size_t i = 0; i < 8; ++i)
    padding[zeros_end + i] = static_cast<std::byte>(nbits >> (56 - 8 * i));
  update(std::span(padding).first(zeros_end + 8));

  Sha256Digest digest;
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

}  // namespace tensorizer::digest
