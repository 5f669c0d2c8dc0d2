// The device's kernels, run on the host: against libsodium, against published vectors, and their
// arithmetic against one with big integers.
#include <gtest/gtest.h>
#include <sodium.h>
#include <sys/mman.h>

#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "bytes.h"
#include "crypto_oracle.h"
#include "device/cuda/kernels/secretbox.h"
#include "host_kernels.h"
#include "load/device_cipher.h"

namespace tensorizer {
namespace {

using crypto::testing::Message;
using crypto::testing::some_bytes;
using device::ChunkToOpen;
using device::kMaxSegments;
using device::kPartialWords;
using device::kSegmentNbytes;
using testing::Bytes;

// Memory between pages that nobody may touch, `nbytes` at its front or at its end, where what is
// left of 16 bytes holds canaries.
class Guarded {
 public:
  Guarded(const std::vector<uint8_t>& bytes, bool at_end)
      : nbytes_(bytes.size()), room_((nbytes_ + 15) / 16 * 16) {
    pages_ = (room_ + kPage - 1) / kPage * kPage;
    memory_ = static_cast<uint8_t*>(
        ::mmap(nullptr, pages_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    uint8_t* const inner = memory_ + kPage;
    EXPECT_EQ(::mprotect(inner, pages_, PROT_READ | PROT_WRITE), 0);
    std::memset(inner, kCanary, pages_);
    data_ = at_end ? inner + pages_ - room_ : inner;
    std::copy(bytes.begin(), bytes.end(), data_);
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    std::swap(room_, other.room_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~Guarded() {
    if (memory_) ::munmap(memory_, pages_ + 2 * kPage);
  }

  std::byte* data() const { return reinterpret_cast<std::byte*>(data_); }
  bool holds(const std::vector<uint8_t>& bytes) const {
    const auto is_canary = [](uint8_t byte) { return byte == kCanary; };
    return bytes.size() == nbytes_ && std::memcmp(data_, bytes.data(), nbytes_) == 0 &&
           std::all_of(data_ + nbytes_, data_ + room_, is_canary);
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr uint8_t kCanary = 0xA5;
  uint8_t* memory_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
  size_t room_ = 0;
  size_t pages_ = 0;
};

template <class T>
Guarded guarded(const std::vector<T>& values) {
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(values.data()),
                                       values.size() * sizeof(T));
  return Guarded({bytes.begin(), bytes.end()}, true);
}

// The chunks of one launch, with the memory that the kernels are given beside them: no kernel reads
// or writes beyond any of it.
class Launch {
 public:
  explicit Launch(int order = HOST_SHUFFLED, uint64_t seed = 1) : order_(order), seed_(seed) {}

  // The chunk of the message as it was sealed; what a test changes afterwards is a forgery.
  ChunkToOpen& add(const Message& message) {
    memory_.emplace_back(message.cipher, chunks_.size() % 2 == 0);
    ChunkToOpen chunk;
    const crypto::SecretKey key(std::as_bytes(std::span(message.key)));
    load::describe_chunk(chunk, memory_.back().data(), message.cipher.size(),
                         std::as_bytes(std::span(message.mac)).first<kMacNbytes>(),
                         std::as_bytes(std::span(message.nonce)).first<kNonceNbytes>(), key);
    return add(chunk);
  }

  ChunkToOpen& add(const ChunkToOpen& chunk) {
    chunks_.push_back(chunk);
    chunks_.back().first_segment = segments_;
    segments_ += chunk.segments;
    return chunks_.back();
  }

  // Runs both kernels; the verdicts.
  std::vector<uint32_t> run() {
    std::vector<uint32_t> chunk_of;
    for (size_t i = 0; i < chunks_.size(); ++i)
      chunk_of.insert(chunk_of.end(), chunks_[i].segments, static_cast<uint32_t>(i));
    const Guarded chunk_memory = guarded(chunks_), table_memory = guarded(chunk_of);
    const Guarded partial_memory =
        guarded(std::vector<uint32_t>(kPartialWords * segments_, 0xA5A5A5A5));
    std::vector<uint32_t> verdicts(chunks_.size(), 0xA5A5A5A5);
    const Guarded verdict_memory = guarded(verdicts);
    std::byte* chunks = chunk_memory.data();
    std::byte* table = table_memory.data();
    std::byte* partial = partial_memory.data();
    std::byte* verdict = verdict_memory.data();
    void* for_mac[] = {&chunks, &table, &partial};
    void* for_open[] = {&chunks, &table, &partial, &verdict};
    EXPECT_EQ(host_kernel_run("tz_mac", segments_, for_mac, order_, seed_), 0);
    EXPECT_EQ(host_kernel_run("tz_open", segments_, for_open, order_, seed_), 0);
    std::memcpy(verdicts.data(), verdict, verdicts.size() * sizeof(uint32_t));
    return verdicts;
  }

  const Guarded& memory(size_t chunk) const { return memory_[chunk]; }
  ChunkToOpen& chunk(size_t i) { return chunks_[i]; }

 private:
  const int order_;
  const uint64_t seed_;
  std::vector<Guarded> memory_;
  std::vector<ChunkToOpen> chunks_;
  uint32_t segments_ = 0;
};

void expect_opened(const std::vector<Message>& messages, int order, uint64_t seed) {
  Launch launch(order, seed);
  for (const Message& message : messages) launch.add(message);
  const std::vector<uint32_t> verdicts = launch.run();
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(verdicts[i], device::kVerdictGenuine) << messages[i].plain.size() << " bytes";
    EXPECT_TRUE(launch.memory(i).holds(messages[i].plain)) << messages[i].plain.size() << " bytes";
  }
}

TEST(Kernels, OpenEveryEdgeOfAChunkInEveryOrderOfThreads) {
  std::vector<size_t> sizes(65);
  std::iota(sizes.begin(), sizes.end(), size_t{1});
  for (const size_t edge : {64 * 1024, 128 * 1024, 256 * 1024, 2 * 1024 * 1024}) {
    for (const int by : {-48, -33, -32, -31, -17, -16, -15, -1, 0, 1, 15, 16, 17, 31, 32, 33, 64})
      sizes.push_back(static_cast<size_t>(static_cast<int>(edge) + by));
  }
  sizes.push_back(kMaxSegments * kSegmentNbytes);
  sizes.push_back(kMaxSegments * kSegmentNbytes - 1);
  std::vector<Message> messages;
  for (const size_t nbytes : sizes) messages.emplace_back(nbytes, nbytes);
  for (const int order : {HOST_FORWARD, HOST_BACKWARD, HOST_SHUFFLED})
    expect_opened(messages, order, 7);
}

// 10,000 sizes in all, in parts that several processes share.
class KernelsAtRandomSizes : public ::testing::TestWithParam<uint64_t> {};

TEST_P(KernelsAtRandomSizes, OpenWhatLibsodiumSealed) {
  std::mt19937_64 random(GetParam());
  for (uint64_t seed = 0; seed < 400; ++seed) {
    std::vector<Message> messages;
    for (size_t i = 0; i < 5; ++i) messages.emplace_back(1 + random() % 400'000, random());
    expect_opened(messages, HOST_SHUFFLED, seed);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, KernelsAtRandomSizes, ::testing::Range<uint64_t>(0, 5));

// What each forgery does to chunk 1 of three.
void expect_refused(const char* what, size_t nbytes, auto&& forge) {
  std::vector<Message> messages;
  for (uint64_t seed = 1; seed < 4; ++seed) messages.emplace_back(nbytes, seed);
  Launch launch;
  for (const Message& message : messages) launch.add(message);
  forge(launch.chunk(1), launch.memory(1).data());
  std::vector<uint8_t> before(nbytes);
  std::memcpy(before.data(), launch.memory(1).data(), nbytes);
  const std::vector<uint32_t> verdicts = launch.run();
  EXPECT_EQ(verdicts[1], device::kVerdictForged) << what;
  EXPECT_TRUE(launch.memory(1).holds(before)) << what;
  for (const size_t neighbour : {0, 2}) {
    EXPECT_EQ(verdicts[neighbour], device::kVerdictGenuine) << what;
    EXPECT_TRUE(launch.memory(neighbour).holds(messages[neighbour].plain)) << what;
  }
}

TEST(Kernels, RefuseEachWrongBitOfAMacAndLeaveTheCiphertext) {
  for (unsigned bit = 0; bit < 128; ++bit) {
    expect_refused("a bit of the MAC", 1000, [&](ChunkToOpen& chunk, std::byte*) {
      chunk.mac[bit / 32] ^= 1u << (bit % 32);
    });
  }
}

TEST(Kernels, RefuseWhatWasChangedAndOpenItsNeighbours) {
  constexpr size_t kNbytes = 201'074;  // two segments, an odd end
  for (const size_t at : {size_t{0}, size_t{16}, size_t{4096}, kNbytes / 2, kNbytes - 1}) {
    expect_refused("a byte", kNbytes,
                   [&](ChunkToOpen&, std::byte* data) { data[at] ^= std::byte{0x80}; });
  }
  const Message other(kNbytes, 99);
  ChunkToOpen foreign;
  const auto described = [&](const std::vector<uint8_t>& key, const std::vector<uint8_t>& nonce,
                             const ChunkToOpen& chunk) {
    load::describe_chunk(foreign, reinterpret_cast<std::byte*>(chunk.address), kNbytes,
                         std::as_bytes(std::span(chunk.mac)),
                         std::as_bytes(std::span(nonce)).first<kNonceNbytes>(),
                         crypto::SecretKey(std::as_bytes(std::span(key))));
    foreign.first_segment = chunk.first_segment;
  };
  const Message own(kNbytes, 2);  // what chunk 1 is
  expect_refused("the key", kNbytes, [&](ChunkToOpen& chunk, std::byte*) {
    described(other.key, own.nonce, chunk);
    chunk = foreign;
  });
  for (const size_t at : {0, 15, 16, 23}) {
    expect_refused("the nonce", kNbytes, [&](ChunkToOpen& chunk, std::byte*) {
      std::vector<uint8_t> nonce = own.nonce;
      nonce[at] ^= 1;
      described(own.key, nonce, chunk);
      chunk = foreign;
    });
  }
  expect_refused("another chunk's ciphertext", kNbytes, [&](ChunkToOpen&, std::byte* data) {
    std::memcpy(data, other.cipher.data(), kNbytes);
  });
  expect_refused("two blocks that changed places", kNbytes, [&](ChunkToOpen&, std::byte* data) {
    std::swap_ranges(data, data + 16, data + kSegmentNbytes / 2);
  });
}

TEST(Kernels, SayNothingOfAChunkThatWasNotGivenToThem) {
  const Message one(70'000, 1);
  Launch launch;
  launch.add(one);
  const std::vector<uint32_t> verdicts = launch.run();
  EXPECT_EQ(verdicts, std::vector<uint32_t>{device::kVerdictGenuine});
  void* none[] = {nullptr};
  EXPECT_EQ(host_kernel_run("tz_unknown", 1, none, HOST_FORWARD, 1), 1);
}

// --- Poly1305 alone ------------------------------------------------------------------------------

// A number modulo 2^130 - 5, by additions alone.
class Big {
 public:
  Big() = default;
  Big(uint64_t high, unsigned __int128 low) : high_(high), low_(low) { reduce(); }
  explicit Big(const uint32_t* limbs) {
    for (int i = 5; i-- > 0;) {
      for (int bit = 0; bit < 26; ++bit) *this = *this + *this;
      *this = *this + Big(0, limbs[i]);
    }
  }

  friend Big operator+(const Big& a, const Big& b) {
    const unsigned __int128 low = a.low_ + b.low_;
    return Big(a.high_ + b.high_ + (low < a.low_ ? 1 : 0), low);
  }
  friend Big operator*(const Big& a, const Big& b) {
    Big product;
    for (int bit = 130; bit-- > 0;) {
      product = product + product;
      if (b.bit(bit)) product = product + a;
    }
    return product;
  }
  friend bool operator==(const Big& a, const Big& b) {
    return a.high_ == b.high_ && a.low_ == b.low_;
  }
  void to_limbs(uint32_t (&limbs)[5]) const {
    for (int i = 0; i < 5; ++i) {
      limbs[i] = 0;
      for (int k = 0; k < 26; ++k) limbs[i] |= static_cast<uint32_t>(bit(26 * i + k)) << k;
    }
  }

 private:
  bool bit(int at) const {
    return at < 128 ? ((low_ >> at) & 1) != 0 : ((high_ >> (at - 128)) & 1) != 0;
  }
  void reduce() {
    while (high_ > 3 || (high_ == 3 && low_ >= ~static_cast<unsigned __int128>(0) - 4)) {
      // minus 2^130 - 5
      const unsigned __int128 low = low_ + 5;
      high_ = high_ - 4 + (low < low_ ? 1 : 0);
      low_ = low;
    }
  }

  uint64_t high_ = 0;
  unsigned __int128 low_ = 0;
};

// A chunk whose MAC is made with a one-time key that the test chooses.
ChunkToOpen chunk_of_key(const std::vector<uint8_t>& one_time_key, const std::byte* data,
                         size_t nbytes) {
  ChunkToOpen chunk{};
  chunk.address = reinterpret_cast<uintptr_t>(data);
  chunk.nbytes = nbytes;
  chunk.segments = static_cast<uint32_t>((nbytes + kSegmentNbytes - 1) / kSegmentNbytes);
  unsigned __int128 r = 0;
  for (int i = 16; i-- > 0;) r = (r << 8) | one_time_key[i];
  const unsigned __int128 clamp =
      (static_cast<unsigned __int128>(0x0ffffffc0ffffffc) << 64) | 0x0ffffffc0fffffff;
  Big power(0, r & clamp);
  for (auto& stored : chunk.power) {
    power.to_limbs(stored);
    power = power * power;
  }
  std::memcpy(chunk.pad, one_time_key.data() + 16, sizeof chunk.pad);
  return chunk;
}

// Whether the kernels find this MAC of the message, and no other.
void expect_mac(const std::vector<uint8_t>& key, const std::vector<uint8_t>& text,
                const uint8_t* mac) {
  for (const bool wrong : {false, true}) {
    const Guarded memory(text, true);
    Launch launch;
    ChunkToOpen& chunk = launch.add(chunk_of_key(key, memory.data(), text.size()));
    std::memcpy(chunk.mac, mac, sizeof chunk.mac);
    chunk.mac[3] ^= (wrong ? 1u << 31 : 0u);
    EXPECT_EQ(launch.run()[0], wrong ? device::kVerdictForged : device::kVerdictGenuine)
        << text.size() << " bytes";
  }
}

void expect_same_mac(const std::vector<uint8_t>& key, const std::vector<uint8_t>& text) {
  uint8_t mac[crypto_onetimeauth_BYTES];
  crypto_onetimeauth(mac, text.data(), text.size(), key.data());
  expect_mac(key, text, mac);
}

TEST(Kernels, AuthenticateAsOnetimeauthDoesAtTheBoundsOfTheirArithmetic) {
  std::vector<std::vector<uint8_t>> keys = {std::vector<uint8_t>(32, 0xff),
                                            std::vector<uint8_t>(32, 0)};
  keys.push_back(keys[0]);
  std::fill(keys[2].begin() + 16, keys[2].end(), uint8_t{0});  // r at the clamp, nothing added
  keys.push_back(some_bytes(32, 5));
  keys.push_back(std::vector<uint8_t>(32, 0));
  keys[4][0] = 1;  // r = 1: the sum of the blocks
  keys.push_back(keys[4]);
  std::fill(keys[5].begin() + 16, keys[5].end(), uint8_t{0xff});
  for (const auto& key : keys) {
    for (const size_t nbytes : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{4096},
                                size_t{65'536}, size_t{131'071}, size_t{131'072}, size_t{131'073},
                                size_t{3 * 131'072}, size_t{kMaxSegments * kSegmentNbytes}}) {
      for (const uint8_t value : {uint8_t{0x00}, uint8_t{0xff}})
        expect_same_mac(key, std::vector<uint8_t>(nbytes, value));
    }
  }
}

TEST(Kernels, AuthenticateSumsNextToTheModulusAsOnetimeauthDoes) {
  // With r = 1 the sum is that of the blocks: three of them make 2^130 - 6 + i.
  std::vector<uint8_t> key(32, 0);
  key[0] = 1;
  for (const uint8_t pad : {uint8_t{0x00}, uint8_t{0xff}}) {
    std::fill(key.begin() + 16, key.end(), pad);
    for (unsigned i = 0; i < 12; ++i) {
      std::vector<uint8_t> text(48, 0xff);  // 3 * (2^129 - 1) = 2^130 - 6 + 2^129 + 3
      text[16] = static_cast<uint8_t>(0xf0 + i);
      text[0] = static_cast<uint8_t>(0xf5 + i % 3);
      expect_same_mac(key, text);
      std::vector<uint8_t> small(32, 0xff);  // 2^130 - 2 and a little less
      small[0] = static_cast<uint8_t>(0xff - i);
      expect_same_mac(key, small);
    }
  }
}

TEST(Kernels, MultiplyAndReduceAsBigIntegersDo) {
  std::mt19937_64 random(11);
  const uint32_t most_a = (1u << 30) - 1;
  const uint32_t most_b = (1u << 26) - 1;
  for (int round = 0; round < 2000; ++round) {
    uint32_t a[5];
    uint32_t b[5];
    for (int i = 0; i < 5; ++i) {
      const uint64_t kind = round == 0 ? 0 : random() % 4;
      a[i] = kind == 0 ? most_a : kind == 1 ? 0 : static_cast<uint32_t>(random()) & most_a;
      b[i] = kind == 0 ? most_b : kind == 2 ? 0 : static_cast<uint32_t>(random()) & most_b;
    }
    uint32_t product[5];
    host_kernel_multiply(a, b, product);
    EXPECT_TRUE(Big(product) == Big(a) * Big(b));
    EXPECT_LT(product[1], (1u << 26) + (1u << 9));
    for (const int i : {0, 2, 3, 4}) EXPECT_LT(product[i], 1u << 26);

    for (int i = 0; i < 5; ++i) {
      const uint64_t kind = round == 0 ? 0 : random() % 4;
      a[i] = kind == 0 ? UINT32_MAX : kind == 1 ? most_b : static_cast<uint32_t>(random());
    }
    if (round % 4 == 1) {  // 2^130 - 8 to 2^130 - 1
      std::fill(a + 1, a + 5, most_b);
      a[0] = most_b - static_cast<uint32_t>(round) % 8;
    }
    uint32_t wanted[5];
    uint32_t found[5];
    Big(a).to_limbs(wanted);
    host_kernel_reduce(a, found);
    EXPECT_TRUE(std::equal(wanted, wanted + 5, found)) << round;
  }
}

std::vector<uint8_t> hex(std::string_view text) {
  const Bytes bytes = testing::from_hex(text);
  const auto* const first = reinterpret_cast<const uint8_t*>(bytes.data());
  return {first, first + bytes.size()};
}

TEST(Kernels, GiveThePublishedResults) {
  // RFC 8439, section 2.5.2
  const auto key = hex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b");
  const std::string_view text = "Cryptographic Forum Research Group";
  expect_mac(key, {text.begin(), text.end()}, hex("a8061dc1305136c6c22b8baf0c0127a9").data());

  // "Cryptography in NaCl", section 10: XSalsa20 and Poly1305 of 131 bytes
  Message message(131, 1);
  message.key = hex("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389");
  message.nonce = hex("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37");
  message.plain = hex(
      "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c"
      "61296cdc3c01233561f41db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f"
      "21af1fde048977eb48f59ffd4924ca1c60902e52f0a089bc76897040e082f937763848645e0705");
  message.mac = hex("f3ffc7703f9400e52a7dfb4b3d3305d9");
  message.cipher = hex(
      "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186ac0dfc17c98dce87b4da7f011ec48"
      "c97271d2c20f9b928fe2270d6fb863d51738b48eeee314a7cc8ab932164548e526ae90224368517acfeabd6bb373"
      "2bc0e9da99832b61ca01b6de56244a9e88d5f9b37973f622a43d14a6599b1f654cb45a74e355a5");
  expect_opened({message}, HOST_SHUFFLED, 1);
}

// --- what the host tells them --------------------------------------------------------------------

TEST(Kernels, AreToldNothingThatOpensAnotherChunk) {
  const Message message(100'000, 4);
  Launch launch;
  const ChunkToOpen& chunk = launch.add(message);
  const auto bytes = std::as_bytes(std::span(&chunk, 1));
  for (size_t part = 0; part + 8 <= message.key.size(); part += 8) {
    const auto key = std::as_bytes(std::span(message.key)).subspan(part, 8);
    EXPECT_EQ(std::search(bytes.begin(), bytes.end(), key.begin(), key.end()), bytes.end());
  }
}

TEST(Kernels, AreGivenAlignedChunksOf64KiBTo4MiB) {
  EXPECT_TRUE(load::device_opens(4096, 65'536));
  EXPECT_TRUE(load::device_opens(4112, 4 << 20));
  EXPECT_FALSE(load::device_opens(4096, 65'535));
  EXPECT_FALSE(load::device_opens(4096, (4 << 20) + 1));
  EXPECT_FALSE(load::device_opens(4104, 65'536));
}

}  // namespace
}  // namespace tensorizer
