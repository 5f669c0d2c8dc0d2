// What is left of a local file when the process or the machine stops in the middle of a save.
#include <filesystem>
#include <set>

#include "io/local/file_sink.h"
#include "power_cut.h"
#include "session_harness.h"

namespace tensorizer::tests {
namespace {

using Kind = PowerCut::Step::Kind;
using std::chrono::milliseconds;

class Folder {
 public:
  Folder() {
    std::string path = (std::filesystem::temp_directory_path() / "tensorizer.XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("no folder");
    path_ = path;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string target() const { return path_ / "f"; }
  bool holds_only_the_target() const {
    size_t names = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      ++names;
      if (entry.path() != target()) return false;
    }
    return names == 1;
  }

 private:
  std::filesystem::path path_;
};

// A write call of the scenarios: tensors of bytes, or one that needs another data version.
struct Call {
  std::vector<Tensor> tensors;
  bool growing = false;
  std::vector<uint64_t> wide_shape{};  // of one more tensor, without data
};

void write(save::SaveSession& session, const Call& call, const std::string& stem) {
  if (call.wide_shape.empty()) return write_call(session, call.tensors, call.growing);
  session.begin_call({{.name = stem + "wide", .dtype = "|u1", .shape = call.wide_shape}},
                     std::vector<format::TensorPath>{{stem + "wide"}}, {}, call.growing, {});
  try {
    session.write_payloads(std::vector<device::TensorMemory>(1), nullptr, {});
    session.finish_call({});
  } catch (...) {
    session.abort_call();
    throw;
  }
}

// How many of `calls` the file holds, complete and verified; nullopt: it cannot be read.
std::optional<size_t> calls_in(const Bytes& file, const std::vector<Call>& calls) {
  try {
    PlainSource source(file);
    std::vector<Bytes> found;
    load_all(source, {.workers = 1}, found);
    size_t at = 0, complete = 0;
    for (const Call& call : calls) {
      if (at == found.size()) break;
      if (call.wide_shape.empty()) {
        for (const Tensor& tensor : call.tensors) {
          if (at == found.size() || found[at++] != tensor.data) return std::nullopt;
        }
      } else {
        ++at;
      }
      ++complete;
    }
    return at == found.size() ? std::optional(complete) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<Call> scenario(const std::string& kind) {
  std::vector<Call> calls;
  const auto add = [&](std::vector<size_t> sizes, bool growing, const std::string& stem) {
    const auto number = calls.size();
    calls.push_back({make_tensors(sizes, number, std::to_string(number) + stem), growing});
  };
  if (kind == "appended") {
    for (size_t i = 0; i < 4; ++i) add({700 * i, 3000, 10}, false, "a");
  } else if (kind == "grown") {
    for (size_t i = 0; i < 12; ++i) add({900 + i}, true, "g");
  } else if (kind == "mixed" || kind == "annexed") {
    for (size_t i = 0; i < 8; ++i)
      add(i % 3 == 2 ? std::vector<size_t>{50, 2000} : std::vector<size_t>{99}, i % 3 != 2, "m");
  } else if (kind == "outgrown") {
    for (size_t i = 0; i < 4; ++i)
      add(std::vector<size_t>(1 + 40 * i, 9), false, std::string(200, 'n'));
  } else if (kind == "retagged") {
    add({500, 20}, false, "t");
    add({600}, true, "t");
    add({800}, true, "t");
    calls.push_back({{}, true, {uint64_t{1} << 33, 0}});
    add({700}, true, "t");
    add({1}, false, "t");
  }
  return calls;
}

const std::vector<std::string> kScenarios = {"appended", "grown",    "mixed",
                                             "outgrown", "retagged", "annexed"};

io::FileSink::PathOptions options(PowerCut& disk, bool fsync = true) {
  return {.fsync = fsync, .wait_nbytes = 5000, .wait = milliseconds(1'000'000), .calls = &disk};
}

struct Saved {
  std::vector<size_t> ends;  // steps on record when call i had returned
  size_t closed = 0;         // and when the file was closed
};

// Metadata lie behind the entries, where those of later calls go.
save::SaveOptions settings_of(const std::string& kind) {
  if (kind != "annexed") return {};
  return {.metadata = {{"text", std::string(9000, 'x')}}};
}

Saved save_calls(PowerCut& disk, const std::string& target, const std::vector<Call>& calls,
                 bool fsync = true, const save::SaveOptions& settings = {}) {
  Saved run;
  save::SaveSession session(io::FileSink::replace(target, options(disk, fsync)), 0, settings);
  for (size_t i = 0; i < calls.size(); ++i) {
    write(session, calls[i], std::to_string(i));
    run.ends.push_back(disk.steps.size());
  }
  session.finish({});
  run.closed = disk.steps.size();
  return run;
}

TEST(PowerCut, AtAnyStepTheFileHoldsWholeCallsAndNoneThatWereDurableIsMissing) {
  std::mt19937 random(1);
  for (const std::string& kind : kScenarios) {
    const Folder folder;
    PowerCut disk;
    const std::vector<Call> calls = scenario(kind);
    const Saved run = save_calls(disk, folder.target(), calls, true, settings_of(kind));
    std::set<size_t> seen;
    for (size_t step = 0; step <= disk.steps.size(); ++step) {
      for (int round = 0; round < 12; ++round) {
        const auto content = disk.after(step, folder.target(), false, random);
        if (step < run.ends[0]) {
          if (!content) continue;  // the name is not on the disk yet
        } else {
          ASSERT_TRUE(content) << kind << ", step " << step;
        }
        const auto found = calls_in(*content, calls);
        ASSERT_TRUE(found) << kind << ", step " << step << ": unreadable";
        ASSERT_GE(*found, 1U) << kind << ", step " << step;
        if (step == run.closed) {
          ASSERT_EQ(*found, calls.size()) << kind;
        }
        seen.insert(*found);
      }
    }
    EXPECT_GE(seen.size(), 2U) << kind;
    EXPECT_TRUE(folder.holds_only_the_target()) << kind;
  }
}

TEST(PowerCut, AProcessThatIsKilledAtAnyStepLeavesWholeCalls) {
  std::mt19937 random(2);
  for (const bool fsync : {true, false}) {
    for (const std::string& kind : kScenarios) {
      const Folder folder;
      PowerCut disk;
      const std::vector<Call> calls = scenario(kind);
      const Saved run = save_calls(disk, folder.target(), calls, fsync, settings_of(kind));
      size_t done = 0;
      for (size_t step = run.ends[0]; step <= disk.steps.size(); ++step) {
        while (done < calls.size() && run.ends[done] <= step) ++done;
        const auto content = disk.after(step, folder.target(), true, random);
        ASSERT_TRUE(content) << kind;
        const auto found = calls_in(*content, calls);
        ASSERT_TRUE(found) << kind << ", step " << step << ": unreadable";
        // Single tensors of a synced file may wait for others; nothing else does.
        const bool waits = (fsync || kind == "annexed") && calls[done - 1].growing && done > 1;
        ASSERT_GE(*found, waits ? 1 : done) << kind << ", step " << step;
        ASSERT_LE(*found, done + 1) << kind << ", step " << step;
      }
    }
  }
}

TEST(PowerCut, ADiskThatBreaksAtAnyStepKeepsTheLastContentThatWasComplete) {
  std::mt19937 random(3);
  for (const std::string& kind : kScenarios) {
    const std::vector<Call> calls = scenario(kind);
    size_t total = 0;
    {
      const Folder folder;
      PowerCut disk;
      save_calls(disk, folder.target(), calls, true, settings_of(kind));
      total = disk.steps.size();
    }
    for (size_t fail_at = 0; fail_at < total; ++fail_at) {
      const Folder folder;
      PowerCut disk;
      size_t done = 0;
      bool named = false;
      try {
        disk.fail_at = static_cast<int>(fail_at);
        save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0,
                                  settings_of(kind));
        for (size_t i = 0; i < calls.size(); ++i) {
          write(session, calls[i], std::to_string(i));
          named = true;
          ++done;
        }
        session.finish({});
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), Errc::io) << error.what();
      }
      for (int round = 0; round < 6; ++round) {
        const auto content = disk.after(disk.steps.size(), folder.target(), round == 0, random);
        if (!content && (!named || disk.count(Kind::sync_folder) == 0)) continue;
        ASSERT_TRUE(content) << kind << ", broken at " << fail_at;
        const auto found = calls_in(*content, calls);
        ASSERT_TRUE(found) << kind << ", broken at " << fail_at << ": unreadable";
        if (round > 0 || done == 0) continue;  // the power was cut as well
        const bool waits = calls[done - 1].growing && done > 1;
        ASSERT_GE(*found, waits ? 1 : done) << kind << ", broken at " << fail_at;
      }
    }
  }
}

// The caller handles the error of one call and goes on with the next, as a loop over tensors may.
TEST(PowerCut, AfterASyncThatFailedNothingMoreIsPublishedAndTheEndSaysSo) {
  std::mt19937 random(8);
  for (const std::string& kind : kScenarios) {
    const std::vector<Call> calls = scenario(kind);
    std::vector<size_t> syncs;
    {
      const Folder folder;
      PowerCut disk;
      save_calls(disk, folder.target(), calls, true, settings_of(kind));
      for (size_t step = 0; step < disk.steps.size(); ++step)
        if (disk.steps[step].kind == Kind::sync) syncs.push_back(step);
    }
    ASSERT_GE(syncs.size(), 2U) << kind;
    for (const size_t fail_at : std::span(syncs).subspan(1)) {  // behind the first publication
      const Folder folder;
      PowerCut disk;
      disk.fail_sync_at = static_cast<int>(fail_at);
      save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0,
                                settings_of(kind));
      size_t failed = calls.size();
      uint64_t published = 0;
      for (size_t i = 0; i < calls.size(); ++i) {
        try {
          write(session, calls[i], std::to_string(i));
          ASSERT_EQ(failed, calls.size()) << kind << ", sync " << fail_at << ": call " << i;
          published = session.published_nbytes();
        } catch (const Error& error) {
          failed = std::min(failed, i);
          ASSERT_EQ(error.code(), Errc::io) << error.what();
        }
      }
      EXPECT_THROW(session.finish({}), Error) << kind << ", sync " << fail_at;
      if (failed < calls.size()) {  // else it was the sync of the end
        EXPECT_EQ(session.published_nbytes(), published) << kind << ", sync " << fail_at;
      }
      for (int round = 0; round < 6; ++round) {
        const auto content = disk.after(disk.steps.size(), folder.target(), false, random);
        ASSERT_TRUE(content) << kind << ", sync " << fail_at;
        const auto found = calls_in(*content, calls);
        ASSERT_TRUE(found) << kind << ", sync " << fail_at << ": unreadable";
        ASSERT_GE(*found, 1U);
        ASSERT_LE(*found, failed) << kind << ", sync " << fail_at;
      }
    }
  }
}

TEST(PowerCut, AFirstCallWhoseSyncFailsMayBeTriedAgain) {
  const Folder folder;
  PowerCut disk;
  const std::vector<Call> calls = scenario("appended");
  {
    save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0, {});
    session.begin_call({{.name = "x", .dtype = "|u1", .shape = {0}}},
                       std::vector<format::TensorPath>{{std::string("x")}}, {}, false, {});
    session.write_payloads(std::vector<device::TensorMemory>(1), nullptr, {});
    disk.fail_at = static_cast<int>(disk.steps.size());
    EXPECT_THROW(session.finish_call({}), Error);
    session.abort_call();
    disk.fail_at = -1;
    for (const Call& call : calls) write(session, call, "");
    session.finish({});
  }
  std::mt19937 random(9);
  EXPECT_EQ(calls_in(*disk.after(disk.steps.size(), folder.target(), false, random), calls),
            calls.size());
}

TEST(PowerCut, AFileThatCannotBeFinishedIsClosedAllTheSame) {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto left_open = [&](bool fails) {
    const Folder folder;
    PowerCut disk;
    const auto before = descriptors();
    save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0,
                              settings_of("annexed"));
    for (const Call& call : scenario("grown")) write(session, call, "");
    if (fails) {
      disk.fail_at = static_cast<int>(disk.steps.size());
      EXPECT_THROW(session.finish({}), Error);
    } else {
      session.finish({});
    }
    return descriptors() - before;
  };
  EXPECT_EQ(left_open(true), left_open(false));
}

TEST(PowerCut, SingleTensorsInALoopAreSyncedWithTheNameAndAtTheEnd) {
  const Folder folder;
  PowerCut disk;
  std::vector<Tensor> all;
  {
    save::SaveSession session(
        io::FileSink::replace(folder.target(), {.wait = milliseconds(1'000'000), .calls = &disk}),
        0, {});
    for (int i = 0; i < 1000; ++i) {
      const auto one = make_tensors({40}, static_cast<uint64_t>(i), "t" + std::to_string(i) + ".");
      write_call(session, one, true);
      all.push_back(one[0]);
      if (i == 0) {
        EXPECT_EQ(disk.count(Kind::sync), 1U);
      }
    }
    EXPECT_EQ(disk.count(Kind::sync), 1U);
    EXPECT_LE(disk.count(Kind::write), 1005U);  // one each
    EXPECT_LE(disk.count(Kind::truncate), 2U);
    session.finish({});
  }
  EXPECT_EQ(disk.count(Kind::sync), 3U);  // records and index, then the prologue
  std::mt19937 random(4);
  expect_loads(*disk.after(disk.steps.size(), folder.target(), false, random), all);
}

TEST(PowerCut, WhatWaitsIsPublishedWhenItIsMuchOrWhenTimeHasPassed) {
  for (const bool much : {true, false}) {
    const Folder folder;
    PowerCut disk;
    io::FileSink::PathOptions settings = options(disk);
    settings.wait_nbytes = much ? 3000 : 1 << 30;
    settings.wait = milliseconds(much ? 1'000'000 : 0);
    save::SaveSession session(io::FileSink::replace(folder.target(), settings), 0, {});
    std::vector<Call> calls;
    for (int i = 0; i < 4; ++i) {
      calls.push_back({make_tensors({1900}, static_cast<uint64_t>(i), std::to_string(i)), true});
      write(session, calls.back(), "");
    }
    std::mt19937 random(5);
    const auto content = disk.after(disk.steps.size(), folder.target(), true, random);
    EXPECT_EQ(calls_in(*content, calls), much ? 3U : 4U);
  }
}

TEST(PowerCut, ASessionThatIsAbandonedPublishesWhatWasComplete) {
  const Folder folder;
  PowerCut disk;
  std::vector<Call> calls = scenario("grown");
  std::mt19937 random(6);
  save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0, {});
  for (size_t i = 0; i < calls.size(); ++i) write(session, calls[i], "");
  session.begin_call({{.name = "half", .dtype = "|u1", .shape = {5}, .data_nbytes = 5}},
                     std::vector<format::TensorPath>{{std::string("half")}}, {}, true, {});
  session.abandon();
  for (const bool whole : {true, false})
    EXPECT_EQ(calls_in(*disk.after(disk.steps.size(), folder.target(), true, random), calls),
              calls.size())
        << whole;
}

TEST(PowerCut, ACallThatFailsWhileOthersWaitLosesNothingButItself) {
  const Folder folder;
  PowerCut disk;
  const std::vector<Call> calls = scenario("grown");
  save::SaveSession session(io::FileSink::replace(folder.target(), options(disk)), 0, {});
  for (size_t i = 0; i < 3; ++i) write(session, calls[i], "");
  disk.fail_at = static_cast<int>(disk.steps.size());
  EXPECT_THROW(write(session, calls[3], ""), Error);
  disk.fail_at = -1;
  for (size_t i = 3; i < calls.size(); ++i) write(session, calls[i], "");
  session.finish({});
  std::mt19937 random(7);
  EXPECT_EQ(calls_in(*disk.after(disk.steps.size(), folder.target(), false, random), calls),
            calls.size());
}

}  // namespace
}  // namespace tensorizer::tests
