// CRC-32 and SHA-256 against known answers and against OpenSSL.
#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>

#include "digest/digest.h"
#include "digest/sha256_kernels.h"

namespace tensorizer::digest {
namespace {

std::vector<std::byte> random_bytes(size_t nbytes, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

std::span<const std::byte> text_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hex(const Sha256Digest& digest) {
  std::string text;
  for (std::byte b : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", std::to_integer<unsigned>(b));
    text += two;
  }
  return text;
}

Sha256Digest sha256(std::span<const std::byte> bytes) {
  Sha256 sha;
  sha.update(bytes);
  return sha.finish();
}

Sha256Digest openssl_sha256(std::span<const std::byte> bytes) {
  Sha256Digest digest;
  unsigned nbytes = 0;
  EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), &nbytes,
             EVP_sha256(), nullptr);
  return digest;
}

TEST(Sha256, GivesThePublishedAnswers) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(text_bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(text_bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::vector<std::byte>(1'000'000, std::byte{'a'}))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, AgreesWithOpensslAtEveryLengthAroundBlockEdges) {
  const auto bytes = random_bytes(64 * 5 + 9);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const auto part = std::span(bytes).first(n);
    ASSERT_EQ(hex(sha256(part)), hex(openssl_sha256(part))) << n;
  }
}

TEST(Sha256, DoesNotDependOnHowTheBytesAreCut) {
  const auto bytes = random_bytes(4096);
  const auto whole = hex(openssl_sha256(bytes));
  std::mt19937 generator(7);
  for (int round = 0; round < 200; ++round) {
    Sha256 sha;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(generator() % 200, bytes.size() - at);
      sha.update(std::span(bytes).subspan(at, n));
      at += n;
    }
    ASSERT_EQ(hex(sha.finish()), whole);
  }
}

TEST(Sha256, StreamsUpdatedTogetherGiveWhatSingleOnesGive) {
  const auto bytes = random_bytes(20'000, 2);
  std::mt19937 generator(11);
  for (size_t count = 0; count <= 40; ++count) {
    for (int round = 0; round < 4; ++round) {
      std::vector<Sha256> streams(count);
      std::vector<std::span<const std::byte>> wanted, left;
      for (size_t i = 0; i < count; ++i) {
        const size_t at = generator() % 5000;  // any alignment, some bytes in several streams
        wanted.push_back(std::span(bytes).subspan(at, generator() % 6000 * (generator() % 3)));
      }
      left = wanted;
      while (std::ranges::any_of(left, [](const auto& part) { return !part.empty(); })) {
        std::vector<Sha256::Update> updates;
        for (size_t i = 0; i < count; ++i) {
          const size_t n = std::min<size_t>(generator() % 2000, left[i].size());
          updates.push_back({&streams[i], left[i].first(n)});
          left[i] = left[i].subspan(n);
        }
        Sha256::update_all(updates);
      }
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(hex(streams[i].finish()), hex(openssl_sha256(wanted[i]))) << i << " of " << count;
    }
  }
}

TEST(Sha256, OneCallTakesNoMoreStreamsThanThereAreLanes) {
  EXPECT_EQ(Sha256::at_once(0), 0U);
  EXPECT_EQ(Sha256::at_once(1), 1U);
  for (size_t ready = 1; ready < 100; ++ready) {
    EXPECT_GE(Sha256::at_once(ready), 1U);
    EXPECT_LE(Sha256::at_once(ready), std::min(ready, Sha256::lanes()));
  }
  EXPECT_EQ(Sha256::at_once(1000), Sha256::lanes());
}

// How many messages each number of lanes is used from; 0: never.
std::array<size_t, 3> changes(const Sha256Times& times) {
  std::array<size_t, 3> from{};
  for (const Sha256Kernel::Width& width : widths_for(times)) {
    if (width.lanes == 16) from[0] = width.from;
    if (width.lanes == 8) from[1] = width.from;
    if (width.lanes == 2) from[2] = width.from;
  }
  return from;
}

TEST(Sha256, EachProcessorGetsTheWayThatIsFasterOnIt) {
  using From = std::array<size_t, 3>;
  // Sapphire Rapids, in cycles a byte.
  EXPECT_EQ(changes({.pair = 1.4, .eight = 1.0, .sixteen = 0.77}), (From{12, 6, 2}));
  // Zen 4, in ns a byte: pairs at every count.
  EXPECT_EQ(changes({.pair = 1 / 3.49, .eight = 1 / 2.73, .sixteen = 1 / 2.9}), (From{0, 0, 2}));
  EXPECT_EQ(changes({.pair = 1.0, .eight = 1.1, .sixteen = 0.6}), (From{10, 0, 2}));
  EXPECT_EQ(changes({.pair = 1.0, .eight = 0.9, .sixteen = 2}), (From{0, 8, 2}));
  EXPECT_EQ(changes({.pair = 4.0, .eight = 1.0, .sixteen = 0.5}), (From{9, 3, 2}));
  EXPECT_EQ(changes({.pair = 1.0, .eight = 1.0, .sixteen = 1.0}), (From{0, 0, 2}));
}

TEST(Sha256, TheWayOfThisProcessorIsMeasuredOnceAndEndsWithSingleMessages) {
  const Sha256Kernel& here = sha256_kernel_here();
  EXPECT_EQ(&here, &sha256_kernel_here());
  EXPECT_EQ(here.widths.back().from, 1U);
  EXPECT_TRUE(std::ranges::is_sorted(here.widths, std::greater<>{}, &Sha256Kernel::Width::from));
}

TEST(Sha256, ACopyContinuesOnItsOwn) {
  const auto bytes = random_bytes(300);
  Sha256 first;
  first.update(std::span(bytes).first(100));
  Sha256 second = first;
  first.update(std::span(bytes).subspan(100));
  EXPECT_EQ(hex(first.finish()), hex(openssl_sha256(bytes)));
  EXPECT_EQ(hex(second.finish()), hex(openssl_sha256(std::span(bytes).first(100))));
}

using State = std::array<uint32_t, 8>;

State any_state(std::mt19937& generator) {
  State state;
  for (uint32_t& word : state) word = static_cast<uint32_t>(generator());
  return state;
}

// Messages in buffers of exactly their size, at odd addresses: a sanitizer sees what is read beyond
// them.
struct Message {
  Message(size_t nblocks, size_t odd, std::mt19937& generator)
      : bytes(random_bytes(nblocks * 64 + odd, static_cast<uint32_t>(generator()))),
        nblocks(nblocks),
        odd(odd),
        state(any_state(generator)),
        wanted(state) {
    openssl_absorb(wanted.data(), data(), nblocks);
  }
  const std::byte* data() const { return bytes.data() + odd; }

  std::vector<std::byte> bytes;
  size_t nblocks, odd;
  State state, wanted;
};

TEST(Sha256, EveryWidthOfEveryKernelAgreesWithOpensslOnAnyStateInEveryLane) {
  std::mt19937 generator(6);
  for (const Sha256Kernel& kernel : compiled_sha256_kernels()) {
    if (!kernel.usable()) continue;
    for (const Sha256Kernel::Width& width : kernel.widths) {
      ASSERT_LE(width.lanes, kMostLanes);
      // Some lanes of a wide kernel may be idle, a pair is a pair.
      for (size_t count = width.lanes > 2 ? 1 : width.lanes; count <= width.lanes; ++count) {
        for (const size_t nblocks : {1, 2, 3, 33}) {
          std::vector<Message> messages;
          for (size_t i = 0; i < count; ++i)
            messages.emplace_back(nblocks, generator() % 64, generator);
          std::vector<BlockRun> runs;
          for (Message& message : messages)
            runs.push_back({message.state.data(), message.data(), nblocks});
          width.absorb(runs.data(), count, nblocks);
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(messages[i].state, messages[i].wanted)
                << kernel.name << ", " << width.lanes << " lanes, message " << i << " of " << count;
        }
      }
    }
  }
}

TEST(Sha256, EveryKernelAbsorbsMessagesOfAnyNumberAndLength) {
  std::mt19937 generator(8);
  for (const Sha256Kernel& kernel : compiled_sha256_kernels()) {
    if (!kernel.usable()) continue;
    for (size_t count = 0; count < 50; ++count) {
      std::vector<Message> messages;
      for (size_t i = 0; i < count; ++i) {
        const size_t most = generator() % 4 == 0 ? 60 : 5;
        messages.emplace_back(generator() % most, generator() % 64, generator);
      }
      std::vector<BlockRun> runs;
      for (Message& message : messages)
        runs.push_back({message.state.data(), message.data(), message.nblocks});
      absorb_all(kernel, runs);
      for (const Message& message : messages)
        ASSERT_EQ(message.state, message.wanted) << kernel.name << ", " << count << " messages";
    }
  }
}

TEST(Sha256, TheLastKernelRunsEverywhereAndEachHasAWidthForOneMessage) {
  EXPECT_TRUE(compiled_sha256_kernels().back().usable());
  EXPECT_TRUE(sha256_kernel_here().usable());
  for (const Sha256Kernel& kernel : compiled_sha256_kernels()) {
    EXPECT_EQ(kernel.width_for(1).lanes, 1U) << kernel.name;
    EXPECT_EQ(kernel.widths.back().from, 1U) << kernel.name;
    EXPECT_EQ(&kernel.width_for(1000), &kernel.widths.front()) << kernel.name;
  }
}

// Bit by bit, from the definition.
uint32_t slow_crc32(uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  for (std::byte byte : bytes) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
  }
  return ~crc;
}

TEST(Crc32, GivesThePublishedAnswer) {
  EXPECT_EQ(crc32(0, text_bytes("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32(0, {}), 0u);
}

TEST(Crc32, AgreesWithTheDefinitionAtEveryLengthAndContinues) {
  const auto bytes = random_bytes(700);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const auto part = std::span(bytes).first(n);
    ASSERT_EQ(crc32(0, part), slow_crc32(0, part)) << n;
    ASSERT_EQ(crc32(crc32(0, part), std::span(bytes).subspan(n)), crc32(0, bytes)) << n;
  }
}

TEST(Crc32, OfAWholeFollowsFromItsParts) {
  const auto bytes = random_bytes(100'000);
  std::mt19937 generator(5);
  for (int round = 0; round < 300; ++round) {
    const size_t cut = generator() % (bytes.size() + 1);
    const auto a = std::span(bytes).first(cut), b = std::span(bytes).subspan(cut);
    ASSERT_EQ(crc32_combine(crc32(0, a), crc32(0, b), b.size()), crc32(0, bytes)) << cut;
  }
  EXPECT_EQ(crc32_combine(0x12345678, 0, 0), 0x12345678u);
}

TEST(Crc32, CombinesLengthsThatNoMemoryHolds) {
  // CRC of 2^k zero bytes by doubling, against one step of the combination: (A || zeros) || zeros.
  uint32_t zeros = crc32(0, std::vector<std::byte>(1));
  uint64_t nbytes = 1;
  const uint32_t a = crc32(0, text_bytes("tensor"));
  for (; nbytes < uint64_t{1} << 60; nbytes *= 2) {
    const uint32_t twice = crc32_combine(zeros, zeros, nbytes);
    const uint32_t stepwise = crc32_combine(crc32_combine(a, zeros, nbytes), zeros, nbytes);
    ASSERT_EQ(crc32_combine(a, twice, 2 * nbytes), stepwise) << nbytes;
    zeros = twice;
  }
}

}  // namespace
}  // namespace tensorizer::digest
