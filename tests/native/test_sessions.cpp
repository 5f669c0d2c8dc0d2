// What a save session writes, a load session reads: every path of both, on memory.

#include "session_harness.h"

namespace tensorizer::tests {
namespace {

constexpr size_t kChunk = 2 << 20;
constexpr size_t kUnit = 8 << 20;
const std::vector<size_t> kMixedSizes = {
    0,          1,      63,         64,        4096,      100'000,      262'144,
    kChunk - 1, kChunk, kChunk + 1, 3'000'000, kUnit - 1, kUnit + 4097, 2 * kUnit + 5,
    17,         0,      999};

save::SaveOptions encrypted_options() { return {.hashes = {false, true}, .key = test_key()}; }
std::shared_ptr<load::KeyRing> ring(unsigned char fill = 7) {
  return std::make_shared<load::KeyRing>(test_key(fill));
}

TEST(Sessions, WhatIsSavedIsLoadedByAnyNumberOfWorkers) {
  const auto tensors = make_tensors(kMixedSizes, 1);
  const Bytes file = save_all(tensors);
  for (unsigned workers : {1U, 2U, 5U})
    expect_loads(file, tensors, {.verify = workers != 2, .workers = workers});
}

TEST(Sessions, EncryptedTensorsComeBackAndTheFileHoldsNoPlaintext) {
  const auto tensors = make_tensors(kMixedSizes, 2);
  const Bytes file = save_all(tensors, encrypted_options());
  expect_loads(file, tensors, {.keys = ring()});
  expect_loads(file, tensors, {.verify = false, .workers = 1, .keys = ring()});
  const Bytes& plain = tensors[5].data;
  EXPECT_EQ(memmem(file.data(), file.size(), plain.data(), 64), nullptr);
}

TEST(Sessions, AMemorySourceThatOffersViewsDecryptsFromThem) {
  const auto tensors = make_tensors(kMixedSizes, 3);
  const Bytes file = save_all(tensors, encrypted_options());
  io::MemorySource source(file, "view");
  std::vector<Bytes> found;
  load_all(source, {.keys = ring()}, found);
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(testing::same(found[i], tensors[i].data));
}

// Says that its reads are answered from memory, or not, and who asked for them.
class WatchedSource final : public io::RangeSource {
 public:
  WatchedSource(Bytes bytes, bool in_memory) : bytes_(std::move(bytes)), in_memory_(in_memory) {}
  const std::string& name() const noexcept override { return file_.name(); }
  std::optional<uint64_t> size() const override { return file_.size(); }
  io::SourceTraits traits() const override { return {.concurrency = 4, .in_memory = in_memory_}; }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override {
    if (std::this_thread::get_id() != caller_) elsewhere = true;
    file_.read_at(offset, buffers, stop);
  }
  uint64_t bytes_read() const noexcept override { return file_.bytes_read(); }
  std::atomic<bool> elsewhere{false};

 private:
  Bytes bytes_;
  io::MemorySource file_{bytes_, "watched"};
  bool in_memory_;
  const std::thread::id caller_ = std::this_thread::get_id();
};

TEST(Sessions, WhatIsSmallAndInMemoryIsLoadedByTheCallingThread) {
  struct Case {
    const char* what;
    size_t nbytes;
    bool in_memory, encrypted, verify, brief;
  };
  constexpr size_t kSmall = 200'000;
  constexpr size_t kLarge = 4 * kUnit;
  for (const Case& c :
       {Case{"small", kSmall, true, false, false, true},
        Case{"small, verified", kSmall, true, false, true, true},
        Case{"large", kLarge, true, false, false, false},
        Case{"small, from afar", kSmall, false, false, false, false},
        Case{"small, a key may have to be derived", kSmall, true, true, false, false}}) {
    const auto tensors = make_tensors({c.nbytes, c.nbytes}, 9);
    WatchedSource source(save_all(tensors, c.encrypted ? encrypted_options() : save::SaveOptions{}),
                         c.in_memory);
    std::vector<Bytes> found;
    const LoadSettings settings{.verify = c.verify, .keys = c.encrypted ? ring() : nullptr};
    EXPECT_EQ(load_all(source, settings, found), c.brief) << c.what;
    EXPECT_FALSE(c.brief && source.elsewhere) << c.what;
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(testing::same(found[i], tensors[i].data)) << c.what;
  }
}

// Is best read in two streams. Keeps where reads of payloads began, in the order of the calls.
class TwoStreams final : public io::RangeSource {
 public:
  explicit TwoStreams(const Bytes& bytes) : file_(bytes, "two streams") {}
  const std::string& name() const noexcept override { return file_.name(); }
  std::optional<uint64_t> size() const override { return file_.size(); }
  io::SourceTraits traits() const override { return {.concurrency = 2, .streams = 2}; }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override {
    if (io::total_nbytes(buffers) >= (1 << 20)) {
      const MutexLock lock(mutex_);
      begins.push_back(offset);
    }
    file_.read_at(offset, buffers, stop);
  }
  uint64_t bytes_read() const noexcept override { return file_.bytes_read(); }
  std::vector<uint64_t> begins;

 private:
  io::MemorySource file_;
  Mutex mutex_;
};

TEST(Sessions, BothStreamsOfASourceAreReadAtTheSamePace) {
  const auto tensors = make_tensors({3 * kUnit, 3 * kUnit + 5, 3 * kUnit, 77, 3 * kUnit + 1}, 12);
  for (const bool encrypted : {false, true}) {
    for (const bool verify : {false, true}) {
      const Bytes file = save_all(tensors, encrypted ? encrypted_options() : save::SaveOptions{});
      TwoStreams source(file);
      std::vector<Bytes> found;
      load_all(source, {.verify = verify, .keys = encrypted ? ring() : nullptr}, found);
      for (size_t i = 0; i < tensors.size(); ++i)
        EXPECT_TRUE(testing::same(found[i], tensors[i].data)) << i;
      const size_t half = source.begins.size() / 2;
      ASSERT_GE(half, 6U);
      const auto is_late = [&](uint64_t begin) { return begin >= file.size() / 2; };
      const auto late = std::count_if(
          source.begins.begin(), source.begins.begin() + static_cast<ptrdiff_t>(half), is_late);
      EXPECT_NEAR(static_cast<double>(late), static_cast<double>(half) / 2, 2);
    }
  }
}

TEST(Sessions, EveryHashChoiceVerifies) {
  const auto tensors = make_tensors({5, 3 * kUnit + 11, 1000}, 4);
  for (bool crc32 : {false, true}) {
    for (bool sha256 : {false, true})
      expect_loads(save_all(tensors, {.hashes = {crc32, sha256}}), tensors);
  }
}

TEST(Sessions, OneBitOfAPayloadAnywhereIsFoundByEitherHash) {
  const auto tensors = make_tensors({2 * kUnit + 100, 77}, 5);
  for (digest::HashChoice hashes :
       {digest::HashChoice{true, false}, digest::HashChoice{false, true}}) {
    const Bytes file = save_all(tensors, {.hashes = hashes});
    const size_t payload = file.size() - 8 - 77 - 64 - 100 - 2 * kUnit;  // somewhere near its start
    for (size_t at : {payload + 5000, payload + kUnit, payload + 2 * kUnit, file.size() - 8 - 40}) {
      Bytes damaged = file;
      damaged[at] ^= std::byte{4};
      PlainSource source(damaged);
      std::vector<Bytes> found;
      try {
        load_all(source, {}, found);
        FAIL() << "byte " << at;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Errc::hash_mismatch) << error.what();
      }
    }
  }
}

TEST(Sessions, AWrongKeyIsFoundWhenTheFileIsOpened) {
  const Bytes file = save_all(make_tensors({100}, 6), encrypted_options());
  PlainSource source(file);
  std::vector<Bytes> found;
  testing::expect_error(Errc::authentication, [&] { load_all(source, {.keys = ring(8)}, found); });
}

TEST(Sessions, WhoForgetsToCheckTheTagGetsNoTensorOfAnAuthenticatedFile) {
  const Bytes file = save_all(make_tensors({100}, 6), encrypted_options());
  PlainSource source(file);
  const auto opened =
      load::open_index(source, load::open_head(source, 0, format::KeyGiven::yes, {}), {});
  Bytes into(100);
  const auto keys = ring();
  load::LoadSession session(source, opened, {{.destination = {into.data(), 100, nullptr}}},
                            {.keys = keys.get()});
  const std::string text = testing::expect_error(Errc::authentication, [&] { run_load(session); });
  EXPECT_NE(text.find("tensor "), std::string::npos) << text;
  EXPECT_TRUE(testing::same(into, Bytes(100)));
}

TEST(Sessions, AWrongKeyIsACryptoErrorAndEveryDestinationIsWiped) {
  const auto tensors = make_tensors({kChunk + 3, 100}, 6);
  const Bytes file = save_all(tensors, encrypted_options());
  PlainSource source(file);
  std::vector<Bytes> found;
  try {
    load_all(source, {.verify = false, .keys = ring(8), .opening_keys = ring()}, found);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::crypto);
    // Which of the chunks is found first is up to the workers.
    EXPECT_NE(std::string(error.what()).find("tensor 't"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("chunk "), std::string::npos) << error.what();
  }
  for (const Bytes& bytes : found) EXPECT_TRUE(testing::same(bytes, Bytes(bytes.size())));
}

TEST(Sessions, CiphertextDamagedInTheLastChunkWipesWhatWasDecryptedBefore) {
  const auto tensors = make_tensors({4 * kChunk, 4 * kChunk}, 7);
  Bytes file = save_all(tensors, encrypted_options());
  file[file.size() - 100] ^= std::byte{1};
  PlainSource source(file);
  std::vector<Bytes> found;
  EXPECT_THROW(load_all(source, {.keys = ring()}, found), Error);
  for (const Bytes& bytes : found) EXPECT_TRUE(testing::same(bytes, Bytes(bytes.size())));
}

TEST(Sessions, LaterCallsAppendAndEarlierContentStaysReadable) {
  auto sink = std::make_shared<MemorySink>();
  save::SaveSession session(sink, 0, {});
  std::vector<Tensor> all;
  for (unsigned call = 0; call < 5; ++call) {
    const auto tensors =
        make_tensors({10, 300'000, 0}, 10 + call, "call" + std::to_string(call) + ".");
    write_call(session, tensors, true);
    all.insert(all.end(), tensors.begin(), tensors.end());
    expect_loads(sink->published, all);
    EXPECT_EQ(session.published_nbytes(), sink->published.size());
  }
}

TEST(Sessions, AnIndexThatOutgrowsItsRoomMovesTheRecords) {
  auto sink = std::make_shared<MemorySink>();
  save::SaveSession session(sink, 0, {});
  std::vector<Tensor> all = make_tensors({100, 5000}, 20, "first");
  write_call(session, all);  // room for little more than these
  for (unsigned call = 0; call < 3; ++call) {
    const auto tensors = make_tensors(std::vector<size_t>(400, 8), 30 + call,
                                      std::string(60, 'n') + std::to_string(call));
    write_call(session, tensors);
    all.insert(all.end(), tensors.begin(), tensors.end());
    expect_loads(sink->published, all);
    EXPECT_EQ(session.published_nbytes(), sink->published.size());
  }
  EXPECT_GE(sink->relocations, 1);
  EXPECT_LE(sink->relocations, 2);  // each time with room to spare
}

TEST(Sessions, ACallThatFailsLeavesThePublishedContentAndTheNamesFree) {
  auto sink = std::make_shared<MemorySink>();
  save::SaveSession session(sink, 0, {});
  const auto first = make_tensors({1000, 2 * kUnit}, 40, "a");
  write_call(session, first);
  const Bytes before = sink->published;
  sink->fail_at = 1;
  const auto second = make_tensors({5, 3 * kUnit}, 41, "b");
  EXPECT_THROW(write_call(session, second), Error);
  EXPECT_EQ(sink->published, before);
  sink->fail_at = -1;
  write_call(session, second);
  std::vector<Tensor> all = first;
  all.insert(all.end(), second.begin(), second.end());
  expect_loads(sink->published, all);
}

TEST(Sessions, NamesInUseAreRefusedBeforeAnythingIsWritten) {
  auto sink = std::make_shared<MemorySink>();
  save::SaveSession session(sink, 0, {});
  write_call(session, make_tensors({4}, 50));
  const Bytes before = sink->bytes;
  EXPECT_THROW(write_call(session, make_tensors({4}, 51)), Error);
  EXPECT_TRUE(testing::same(sink->bytes, before));
}

TEST(Sessions, AFailingSourceEndsTheLoadWithItsError) {
  const auto tensors = make_tensors({3 * kUnit, 100, 2 * kUnit}, 60);
  const Bytes file = save_all(tensors);
  for (int fail_at : {2, 3, 5}) {
    PlainSource source(file);
    source.fail_at = fail_at;
    std::vector<Bytes> found;
    try {
      load_all(source, {}, found);
      FAIL() << fail_at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::io) << error.what();
    }
  }
}

TEST(Sessions, AStopEndsALoadAsCancelled) {
  const auto tensors = make_tensors(std::vector<size_t>(40, 1 << 20), 61);
  const Bytes file = save_all(tensors);
  PlainSource source(file);
  std::stop_source stop;
  stop.request_stop();
  std::vector<Bytes> found;
  try {
    load_all(source, {}, found, stop.get_token());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::cancelled);
  }
}

TEST(Sessions, ADeviceIsFilledThroughTwoBuffersWhateverIsAsked) {
  const auto tensors = make_tensors(kMixedSizes, 70);
  HostEngine engine(2, kUnit);
  const Bytes plain = save_all(tensors, {}, &engine);
  EXPECT_TRUE(
      testing::same(plain, save_all(tensors)));  // saving from a device writes the same file
  expect_loads(plain, tensors, {.workers = 5, .engine = &engine});
  expect_loads(plain, tensors, {.verify = false, .workers = 5, .engine = &engine});
  const Bytes encrypted = save_all(tensors, encrypted_options(), &engine);
  expect_loads(encrypted, tensors, {.workers = 5, .keys = ring(), .engine = &engine});
  EXPECT_EQ(engine.free_buffers(), 2U);
}

TEST(Sessions, ADeviceIsFilledThroughBuffersThatHoldOneChunkAndNothingElse) {
  const auto tensors = make_tensors(kMixedSizes, 72);
  for (const unsigned buffers : {1U, 5U}) {
    HostEngine engine(buffers, kChunk);
    const LoadSettings settings{.workers = 4, .engine = &engine};
    expect_loads(save_all(tensors), tensors, settings);
    LoadSettings keyed = settings;
    keyed.keys = ring();
    expect_loads(save_all(tensors, encrypted_options()), tensors, keyed);
    EXPECT_EQ(engine.free_buffers(), buffers);
  }
}

TEST(Sessions, AFailedDeviceLoadGivesEveryBufferBack) {
  const auto tensors = make_tensors({3 * kUnit, 3 * kUnit}, 71);
  const Bytes file = save_all(tensors);
  HostEngine engine(3, kUnit);
  PlainSource source(file);
  source.fail_at = 4;
  std::vector<Bytes> found;
  EXPECT_THROW(load_all(source, {.engine = &engine}, found), Error);
  EXPECT_EQ(engine.free_buffers(), 3U);
  expect_loads(file, tensors, {.engine = &engine});
}

// Says that its content is not what it was when it was opened.
class ChangedSource final : public io::RangeSource {
 public:
  explicit ChangedSource(const Bytes& bytes) : bytes_(bytes) {}
  const std::string& name() const noexcept override { return bytes_.name(); }
  std::optional<uint64_t> size() const override { return bytes_.size(); }
  io::SourceTraits traits() const override { return bytes_.traits(); }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override {
    bytes_.read_at(offset, buffers, stop);
  }
  void check_unchanged() const override { throw Error(Errc::io, "it was written to", name()); }
  uint64_t bytes_read() const noexcept override { return 0; }

 private:
  PlainSource bytes_;
};

TEST(Sessions, ALoadOfASourceThatChangedMeanwhileFailsHoweverItsBytesLook) {
  const auto tensors = make_tensors({kChunk, kChunk}, 75);
  const Bytes whole = save_all(tensors);
  Bytes damaged = whole;
  damaged[whole.size() - kChunk / 2] ^= std::byte{1};
  for (const bool verify : {false, true}) {
    for (const Bytes* const file : {&std::as_const(whole), &std::as_const(damaged)}) {
      ChangedSource source(*file);
      std::vector<Bytes> found;
      EXPECT_EQ(
          testing::expect_error(Errc::io, [&] { load_all(source, {.verify = verify}, found); }),
          "it was written to");
    }
  }
}

TEST(Sessions, ACopyThatASaveMakesIsDigestedAndWrittenAsItIs) {
  for (const bool encrypted : {false, true}) {
    for (const bool on_device : {false, true}) {
      if (!encrypted && !on_device) continue;  // written from where it is
      auto tensors = make_tensors({100, 2 * kUnit + 5, 3 * kUnit}, 73);
      HostEngine engine(3, kUnit);
      auto sink = std::make_shared<MemorySink>();
      sink->before_write = [&](uint64_t) {
        for (Tensor& tensor : tensors) tensor.data.front() ^= std::byte{1};
        for (Tensor& tensor : tensors) tensor.data.back() ^= std::byte{1};
      };
      save::SaveOptions options = encrypted ? encrypted_options() : save::SaveOptions{};
      options.max_workers = 1;  // whose writes come between its reads
      save::SaveSession session(sink, 0, options);
      write_call(session, tensors, false, on_device ? &engine : nullptr);
      PlainSource source(sink->published);
      std::vector<Bytes> found;
      EXPECT_NO_THROW(load_all(source, {.keys = encrypted ? ring() : nullptr}, found))
          << "encrypted " << encrypted << " device " << on_device;
    }
  }
}

TEST(Sessions, ASaveThatCopiesDealsLargeTensorsInTurn) {
  const auto tensors = make_tensors({3 * kUnit, 3 * kUnit, 3 * kUnit}, 74);
  HostEngine engine(4, kUnit);
  for (const bool encrypted : {false, true}) {
    auto sink = std::make_shared<MemorySink>();
    std::vector<uint64_t> places;
    sink->before_write = [&](uint64_t offset) { places.push_back(offset); };
    save::SaveOptions options = encrypted ? encrypted_options() : save::SaveOptions{};
    options.max_workers = 1;
    save::SaveSession session(sink, 0, options);
    write_call(session, tensors, false, encrypted ? nullptr : &engine);
    ASSERT_GT(places.size(), 4U);
    // Two of them step by step, so that one thread can hash both side by side.
    const uint64_t step = encrypted ? kCipherChunkNbytes : kUnit;
    EXPECT_GT(places[1], places[0] + 2 * kUnit);
    EXPECT_EQ(places[2], places[0] + step);
    EXPECT_EQ(places[3], places[1] + step);
  }
}

TEST(Sessions, ASinkForOneWriterIsWrittenToByOneThreadAtATime) {
  std::vector<size_t> sizes(5, 2 * kUnit + 7);
  sizes.insert(sizes.end(), {0, 5, 100});
  const auto tensors = make_tensors(sizes, 75);
  for (const bool encrypted : {false, true}) {
    for (const bool sha256 : {false, true}) {
      auto sink = std::make_shared<MemorySink>();
      sink->takes_one_writer = true;
      std::atomic<int> writers{0}, overlaps{0};
      sink->before_write = [&](uint64_t) {
        if (++writers > 1) ++overlaps;
        std::this_thread::yield();
        --writers;
      };
      save::SaveOptions options = encrypted ? encrypted_options() : save::SaveOptions{};
      options.hashes.sha256 = sha256;
      options.max_workers = 4;
      save::SaveSession session(sink, 0, options);
      write_call(session, tensors);
      EXPECT_EQ(overlaps, 0);
      PlainSource source(sink->published);
      std::vector<Bytes> found;
      EXPECT_NO_THROW(load_all(source, {.keys = encrypted ? ring() : nullptr}, found));
      for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(found[i], tensors[i].data);
    }
  }
}

// A mount that takes bytes only behind those it has.
class AppendOnlySink final : public io::RangeSink {
 public:
  const std::string& name() const noexcept override { return name_; }
  unsigned concurrency() const noexcept override { return 8; }
  bool any_order() const noexcept override { return true; }
  bool in_order() const noexcept override { return true; }
  using io::RangeSink::write_at;
  void write_at(uint64_t offset, std::span<const io::ConstBuffer> buffers,
                const std::stop_token&) override {
    if (offset != bytes.size()) io::throw_out_of_order(name_, "this came before others");
    for (const io::ConstBuffer& buffer : buffers)
      bytes.insert(bytes.end(), buffer.begin(), buffer.end());
  }
  void relocate(uint64_t, uint64_t, uint64_t, const std::stop_token&) override { FAIL(); }
  void publish(uint64_t end, const std::stop_token&) override { EXPECT_EQ(end, bytes.size()); }
  void finish(const std::stop_token&) override {}
  Bytes bytes;

 private:
  std::string name_ = "mount";
};

TEST(Sessions, WhatNeedsNoBytesOfTheEndIsWrittenFromFrontToBack) {
  const auto tensors = make_tensors(kMixedSizes, 14);
  HostEngine engine(4, kChunk);
  for (device::CopyEngine* from :
       {static_cast<device::CopyEngine*>(nullptr), static_cast<device::CopyEngine*>(&engine)}) {
    for (const bool growing : {false, true}) {
      auto sink = std::make_shared<AppendOnlySink>();
      save::SaveSession session(
          sink, 0, {.hashes = {false, false}, .metadata = {{"text", std::string(5000, 'x')}}});
      write_call(session, tensors, growing, from);
      EXPECT_EQ(session.published_nbytes(), sink->bytes.size());
      EXPECT_THROW(write_call(session, make_tensors({5}, 1, "more")), Error);
      session.finish({});
      expect_loads(sink->bytes, tensors, {.verify = false});
    }
  }
}

TEST(Sessions, WhatCannotBeWrittenFromFrontToBackIsRefusedBeforeAByteAndSaysWhatToDo) {
  for (const save::SaveOptions& options :
       {save::SaveOptions{.hashes = {true, false}}, save::SaveOptions{.hashes = {false, true}},
        save::SaveOptions{.hashes = {false, false}, .key = test_key()}}) {
    auto sink = std::make_shared<AppendOnlySink>();
    save::SaveSession session(sink, 0, options);
    try {
      write_call(session, make_tensors({5}, 1));
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::io);
      EXPECT_NE(std::string(error.what()).find("hashes=None"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(sink->bytes.empty());
    session.finish({});
  }
}

TEST(Sessions, ASequentialSourceIsReadByOneWorkerAtGrowingOffsets) {
  const auto tensors = make_tensors(kMixedSizes, 80);
  const Bytes file = save_all(tensors);
  PlainSource source(file);
  source.settings = {.concurrency = 1, .sequential = true};
  std::vector<Bytes> found;
  load_all(source, {}, found);
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(testing::same(found[i], tensors[i].data));
}

TEST(Sessions, PartsAreTheBytesOfTheirTensorsOnEveryWay) {
  const auto tensors = make_tensors(kMixedSizes, 90);
  const Bytes plain = save_all(tensors), sealed = save_all(tensors, encrypted_options());
  uint32_t seed = 0;
  for (const bool encrypted : {false, true}) {
    for (const bool device : {false, true}) {
      for (const bool in_memory : {false, true}) {
        for (const bool sequential : {false, true}) {
          HostEngine engine(3, kChunk);
          PlainSource source(encrypted ? sealed : plain);
          source.settings = {.concurrency = sequential ? 1U : 4U,
                             .sequential = sequential,
                             .in_memory = in_memory};
          load_parts(source, tensors,
                     {.keys = encrypted ? ring() : nullptr, .engine = device ? &engine : nullptr},
                     ++seed);
          if (device) {
            EXPECT_EQ(engine.free_buffers(), 3U);
          }
        }
      }
    }
  }
}

TEST(Sessions, PartsOfEncryptedTensorsLeaveNothingBehindWhereAChunkIsForged) {
  const auto tensors = make_tensors({4 * kChunk + 5}, 91);
  Bytes file = save_all(tensors, encrypted_options());
  file[file.size() - 8 - kChunk] ^= std::byte{1};  // in the fourth chunk
  PlainSource source(file);
  source.settings.concurrency = 1;
  const auto keys = ring();
  const auto opened = open_all(source, keys.get());
  const std::array<uint64_t, 1> shape{4 * kChunk + 5};
  for (const bool device : {false, true}) {
    HostEngine engine(2, kChunk / 2);  // chunks are longer than a buffer
    Bytes found(4 * kChunk, std::byte{0xAB});
    const std::array<load::SliceDim, 1> box{{{3, found.size(), 1}}};
    load::LoadSession session(source, opened,
                              {{.entry = 0,
                                .runs = load::runs_of(shape, 1, box),
                                .destination = {found.data(), found.size(), nullptr}}},
                              {.max_workers = 1,
                               .keys = keys.get(),
                               .engine = device ? &engine : nullptr,
                               .parts = true});
    testing::expect_error(Errc::crypto, [&] { run_load(session); });
    EXPECT_TRUE(testing::same(std::span(found).first(3 * kChunk), Bytes(3 * kChunk)));
    EXPECT_EQ(engine.free_buffers(), 2U);
  }
}

}  // namespace
}  // namespace tensorizer::tests
