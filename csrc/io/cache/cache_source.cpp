#include "io/cache/cache_source.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_units.h"
#include "io/slices.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstLook{5};
constexpr milliseconds kLastLook{50};
// Others that bring nothing for so long are not waited for.
constexpr milliseconds kPatience{2000};
// After it, what has come of a read is kept: others wait for it, and the rest may never come.
constexpr milliseconds kKeepAfter{500};

uint64_t begin_of(BlockRun run) noexcept { return run.begin * kCacheBlockNbytes; }

// An entry takes five descriptors. Half of all are for connections and other files.
void check_descriptors() {
  struct rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const UniqueFd lowest(::open("/", O_PATH | O_CLOEXEC));  // the system gives the lowest
  if (!lowest || static_cast<rlim_t>(lowest.get()) >= limit.rlim_cur / 2)
    throw Error(Errc::io, "more than half of the " + std::to_string(limit.rlim_cur) +
                              " descriptors that the process may have (ulimit -n) are in use");
}

}  // namespace

// What a reader wants.
struct CacheSource::Request {
  uint64_t offset;
  uint64_t nbytes;
  std::span<const Slice> slices;

  BlockRun blocks() const noexcept {
    return {offset / kCacheBlockNbytes, ceil_div(offset + nbytes, kCacheBlockNbytes)};
  }
  // The bytes of `run` that are wanted: where they begin, and where they go.
  std::pair<uint64_t, std::vector<Slice>> within(BlockRun run) const {
    const uint64_t begin = std::max(offset, begin_of(run));
    const uint64_t end = std::min(offset + nbytes, run.end * kCacheBlockNbytes);
    return {begin, part_of(slices, begin - offset, end - begin)};
  }
};

CacheSource::CacheSource(std::shared_ptr<CacheFolder> folder, CacheKey key,
                         std::shared_ptr<RangeSource> network, std::string name)
    : folder_(std::move(folder)),
      key_(std::move(key)),
      network_(std::move(network)),
      name_(std::move(name)),
      fetched_(static_cast<size_t>(ceil_div(CacheEntry::blocks_of(key_.nbytes), 8))) {}

std::shared_ptr<CacheSource> CacheSource::open(std::shared_ptr<CacheFolder> folder, CacheKey key,
                                               std::shared_ptr<RangeSource> network,
                                               std::string name) {
  std::shared_ptr<CacheSource> source(
      new CacheSource(std::move(folder), std::move(key), std::move(network), std::move(name)));
  const CacheKey& k = source->key_;
  if (source->network_) check_descriptors();
  auto entry = source->folder_->open_entry(k.location, k.version, k.nbytes);
  if (!entry && source->network_) {
    const uint64_t room = std::min(CacheFilling::kStepNbytes, k.nbytes);
    const bool too_large = k.limits.max_nbytes && k.nbytes > *k.limits.max_nbytes;
    if (too_large || !source->folder_->make_room(room, k.limits)) return nullptr;
    entry = source->folder_->make_entry(k.location, k.version, k.nbytes, k.about);
  }
  if (!entry) return nullptr;
  source->use(std::move(entry));
  if (source->network_) source->store_head();
  return source;
}

void CacheSource::use(std::shared_ptr<CacheEntry> entry) {
  UniqueFd data(fcntl(entry->data(), F_DUPFD_CLOEXEC, 0));
  if (!data) throw_errno("cannot use", name_, errno);
  if (!key_.about.empty()) entry->touch();
  was_complete_ = entry->is_complete();
  MutexLock lock(mutex_);
  disk_ = std::make_shared<FileSource>(std::move(data), name_);
  filling_ = std::make_shared<CacheFilling>(folder_, std::move(entry), key_);
}

CacheSource::~CacheSource() { rest(); }

std::shared_ptr<CacheFilling> CacheSource::filling() const {
  MutexLock lock(mutex_);
  if (is_lost_) return nullptr;
  if (filling_ && !filling_->entry().belongs_to_this_process()) {
    // The locks of its descriptions are the parent's, too.
    try {
      auto entry = folder_->open_entry(key_.location, key_.version, key_.nbytes);
      filling_ = entry ? std::make_shared<CacheFilling>(folder_, std::move(entry), key_) : nullptr;
    } catch (const Error&) {
      filling_ = nullptr;
    }
  }
  return filling_;
}

void CacheSource::rest() noexcept {
  if (const auto filling = this->filling()) filling->rest();
}

void CacheSource::close() noexcept {
  rest();
  std::shared_ptr<FileSource> file;
  std::shared_ptr<CacheFilling> filling;  // what waits to be written keeps it until then
  {
    MutexLock lock(mutex_);
    is_lost_ = true;
    file.swap(disk_);
    filling.swap(filling_);
  }
  if (network_) network_->close();
}

std::shared_ptr<FileSource> CacheSource::disk() const {
  MutexLock lock(mutex_);
  return disk_;
}

SourceTraits CacheSource::traits() const {
  const auto disk = this->disk();
  // As it was at the opening: readers rely on an answer that does not change.
  if (disk && (was_complete_ || !network_)) return disk->traits();
  return network_ ? network_->traits() : SourceTraits{};
}

const std::byte* CacheSource::view(uint64_t offset, uint64_t nbytes) noexcept {
  return network_ ? network_->view(offset, nbytes) : nullptr;
}

uint64_t CacheSource::bytes_read() const noexcept {
  return from_disk_.load() + (network_ ? network_->bytes_read() : 0);
}

uint64_t CacheSource::present_nbytes() const {
  const auto filling = this->filling();
  return filling ? filling->entry().present_nbytes() : 0;
}

bool CacheSource::is_present(uint64_t offset, uint64_t nbytes) const {
  const auto filling = this->filling();
  if (!filling || nbytes == 0) return filling != nullptr;
  if (offset > key_.nbytes || nbytes > key_.nbytes - offset) return false;
  return filling->entry().has(Request{offset, nbytes, {}}.blocks());
}

uint64_t CacheSource::stored_nbytes() const {
  MutexLock lock(mutex_);
  return filling_ ? filling_->stored_nbytes() : 0;
}

uint64_t CacheSource::left_out_nbytes() const {
  MutexLock lock(mutex_);
  return filling_ ? filling_->left_out_nbytes() : 0;
}

std::string CacheSource::trouble() const {
  MutexLock lock(mutex_);
  return filling_ ? filling_->trouble() : std::string();
}

void CacheSource::write_about(const std::string& about) {
  if (const auto filling = this->filling()) filling->entry().write_about(about);
}

bool CacheSource::drop_copy() noexcept {
  // Bytes of the network that failed a check would be damaged in the cache, too.
  const bool was_used = from_disk_.load() != 0;
  const auto filling = this->filling();
  if (!filling) return was_used;  // it is removed already
  if (!was_used && filling->stored_nbytes() == 0) return false;
  return filling->discard("the copy was damaged", false) && was_used;
}

// -- reading -------------------------------------------------------------------------------------

void CacheSource::read_at(uint64_t offset, std::span<const Slice> slices,
                          const std::stop_token& stop) {
  const Request request{offset, total_nbytes(slices), slices};
  if (offset > key_.nbytes || request.nbytes > key_.nbytes - offset)
    throw_truncated(name_, offset, request.nbytes, key_.nbytes);
  if (request.nbytes == 0) return;
  if (network_ && network_->traits().sequential && !was_complete_)
    return read_in_order(request, stop);

  std::vector<BlockRun> left{request.blocks()};
  uint64_t known = 0;
  bool is_late = false;
  Clock::time_point until = Clock::now() + kPatience;
  milliseconds pause = kFirstLook;
  for (;;) {
    const std::shared_ptr<CacheFilling> filling = this->filling();
    std::vector<BlockRun> again;
    bool of_threads = false;
    for (const BlockRun run : left)
      of_threads = read_run(filling, request, run, is_late, again, stop) || of_threads;
    left.swap(again);
    if (left.empty()) return;
    throw_if_stopped(stop);
    // Threads end their work in any case; of other processes, some progress is wanted.
    const uint64_t present = filling ? filling->entry().present_nbytes() : 0;
    if (of_threads || present != known) {
      known = present;
      until = Clock::now() + kPatience;
      pause = kFirstLook;
    }
    is_late = Clock::now() >= until;
    if (filling && !is_late) filling->entry().wait(pause, stop);
    pause = std::min(pause * 2, kLastLook);
  }
}

bool CacheSource::read_run(const std::shared_ptr<CacheFilling>& filling, const Request& request,
                           BlockRun run, bool is_late, std::vector<BlockRun>& left,
                           const std::stop_token& stop) {
  if (!filling) {
    read_network(request, run, stop);
    return false;
  }
  bool of_threads = false;
  for (uint64_t end = run.end; run.begin < end;) {
    const auto [same, present] = filling->entry().first_same({run.begin, end});
    run = same;
    if (present) {
      if (!read_present(*filling, request, run, stop)) read_network(request, run, stop);
    } else if (const auto waiting = filling->waiting_at(run.begin)) {
      run.end = std::min(run.end, waiting->run.end);
      const auto [offset, slices] = request.within(run);
      ScatterCursor(slices).put(waiting->all().subspan(
          static_cast<size_t>(offset - begin_of(waiting->run)), total_nbytes(slices)));
    } else if (!network_ || !filling->is_open()) {
      read_network(request, run, stop);
    } else if (is_late) {
      fetch(*filling, request, run, {}, stop);  // the bytes are the same, whoever writes them
    } else {
      CacheEntry::Claimed claimed{};
      try {
        claimed = filling->entry().claim(run);
      } catch (const Error& error) {  // a file system without locks
        filling->stop(error.what());
        continue;
      }
      run = claimed.run;
      const auto now = filling->entry().first_same(run);
      if (claimed.owner != CacheEntry::Owner::caller) {
        left.push_back(run);
        of_threads = of_threads || claimed.owner == CacheEntry::Owner::threads;
      } else if (now.present || now.run.end != run.end) {
        continue;  // the one who had them before has brought some
      } else {
        fetch(*filling, request, run, std::move(claimed.claim), stop);
      }
    }
    run.begin = run.end;
  }
  return of_threads;
}

bool CacheSource::read_present(CacheFilling& filling, const Request& request, BlockRun run,
                               const std::stop_token& stop) {
  const auto disk = this->disk();
  const auto [offset, slices] = request.within(run);
  try {
    if (!disk) throw Error(Errc::io, name_ + " is closed", name_);
    disk->read_at(offset, slices, stop);
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    filling.discard(error.what());
    MutexLock lock(mutex_);
    is_lost_ = true;
    return false;
  }
  const uint64_t end = offset + total_nbytes(slices);
  for (uint64_t block = run.begin; block < run.end; ++block) {
    if (((fetched_[block / 8].load(std::memory_order_relaxed) >> (block % 8)) & 1) != 0) continue;
    from_disk_ += std::min(end, (block + 1) * kCacheBlockNbytes) -
                  std::max(offset, block * kCacheBlockNbytes);
  }
  return true;
}

void CacheSource::read_network(const Request& request, BlockRun run, const std::stop_token& stop) {
  const auto [offset, slices] = request.within(run);
  if (!network_) {
    const uint64_t nbytes = total_nbytes(slices);
    throw Error(Errc::io,
                name_ + ": bytes " + std::to_string(offset) + " to " +
                    std::to_string(offset + nbytes) + " are not in the cache (" +
                    std::to_string(present_nbytes()) + " of " + std::to_string(key_.nbytes) +
                    " bytes are), and offline is set",
                name_, offset);
  }
  network_->read_at(offset, slices, stop);
}

// All of the blocks come, also what nobody wants of the first and the last one.
void CacheSource::fetch(CacheFilling& filling, const Request& request, BlockRun run,
                        CacheEntry::Claim claim, const std::stop_token& stop) {
  const auto [wanted, slices] = request.within(run);
  const uint64_t begin = begin_of(run);
  const uint64_t end = std::min(run.end * kCacheBlockNbytes, key_.nbytes);
  const uint64_t wanted_end = wanted + total_nbytes(slices);
  std::vector<std::byte> before(static_cast<size_t>(wanted - begin));
  std::vector<std::byte> behind(static_cast<size_t>(end - wanted_end));
  std::vector<Slice> all;
  all.reserve(slices.size() + 2);
  if (!before.empty()) all.emplace_back(before);
  all.insert(all.end(), slices.begin(), slices.end());
  if (!behind.empty()) all.emplace_back(behind);
  Clock::time_point kept_at = Clock::now();
  const auto keep = [&](uint64_t nbytes) {
    // The last block has the claim, which ends when all of them are written.
    const BlockRun there{run.begin, std::min((begin + nbytes) / kCacheBlockNbytes, run.end - 1)};
    if (there.begin >= there.end || Clock::now() - kept_at < kKeepAfter) return;
    const uint64_t there_nbytes = (there.end - there.begin) * kCacheBlockNbytes;
    kept_at = Clock::now();
    note_fetched(there);
    if (filling.add(there, part_of(all, begin_of(there) - begin, there_nbytes), {}, false, stop))
      run.begin = there.end;
  };
  network_->read_telling(begin, all, stop, keep);
  store(filling, run, part_of(all, begin_of(run) - begin, end - begin_of(run)), std::move(claim),
        stop);
}

// -- storing -------------------------------------------------------------------------------------

void CacheSource::store(CacheFilling& filling, BlockRun run, std::span<const Slice> bytes,
                        CacheEntry::Claim claim, const std::stop_token& stop) {
  note_fetched(run);
  if (!filling.add(run, bytes, std::move(claim), patient_, stop))
    filling.leave_out(total_nbytes(bytes));
}

void CacheSource::note_fetched(BlockRun run) noexcept {
  for (uint64_t block = run.begin; block < run.end; ++block)
    fetched_[block / 8].fetch_or(static_cast<uint8_t>(1U << (block % 8)),
                                 std::memory_order_relaxed);
}

// The bytes that came with the opening.
void CacheSource::store_head() {
  const auto filling = this->filling();
  if (!filling || was_complete_) return;
  uint64_t nbytes = 0;
  uint64_t blocks = 0;
  while (blocks < filling->entry().blocks()) {
    const uint64_t end = std::min((blocks + 1) * kCacheBlockNbytes, key_.nbytes);
    if (network_->view(0, end) == nullptr) break;
    nbytes = end;
    ++blocks;
  }
  if (blocks == 0 || filling->entry().has({0, blocks})) return;
  // A sink for bytes is not const; nobody writes here.
  const Slice head(const_cast<std::byte*>(network_->view(0, nbytes)), static_cast<size_t>(nbytes));
  store(*filling, {0, blocks}, std::span<const Slice>(&head, 1), {}, {});
}

// A pass that cannot go back is not asked for more than is wanted: blocks are put together from the
// reads, which come one after another. Only the end of the object comes with what is before it.
void CacheSource::read_in_order(const Request& request, const std::stop_token& stop) {
  const auto filling = this->filling();
  const BlockRun blocks = request.blocks();
  const bool is_kept = filling && filling->is_open();
  if (filling) {
    const auto waiting = filling->waiting_at(blocks.begin);
    const bool waits = waiting && waiting->run.end >= blocks.end;
    std::vector<BlockRun> left;
    if (waits || filling->entry().has(blocks)) {
      read_run(filling, request, blocks, false, left, stop);
      return;
    }
  }
  std::vector<Slice> all(request.slices.begin(), request.slices.end());
  std::vector<std::byte> behind;
  if (is_kept && blocks.end == filling->entry().blocks()) {
    behind.resize(static_cast<size_t>(key_.nbytes - request.offset - request.nbytes));
    if (!behind.empty()) all.emplace_back(behind);
  }
  network_->read_at(request.offset, all, stop);
  if (is_kept) absorb(*filling, request.offset, all, stop);
}

void CacheSource::absorb(CacheFilling& filling, uint64_t offset, std::span<const Slice> slices,
                         const std::stop_token& stop) {
  const uint64_t end = offset + total_nbytes(slices);
  MutexLock lock(carry_mutex_);
  if (carry_at_ + carry_.size() != offset) {
    carry_at_ = align_down(offset, kCacheBlockNbytes);
    const std::byte* const before = network_->view(carry_at_, offset - carry_at_);
    carry_.clear();
    if (before != nullptr) carry_.assign(before, before + (offset - carry_at_));
    if (before == nullptr && offset != carry_at_) carry_at_ = align_up(offset, kCacheBlockNbytes);
  }
  if (carry_at_ >= end) return;
  const uint64_t skipped = carry_at_ > offset ? carry_at_ - offset : 0;
  const uint64_t whole_end = end == key_.nbytes ? end : align_down(end, kCacheBlockNbytes);
  std::vector<Slice> all;
  if (whole_end > carry_at_) {
    if (!carry_.empty()) all.emplace_back(carry_);
    const uint64_t from = offset + skipped;
    const auto part = part_of(slices, skipped, whole_end - from);
    all.insert(all.end(), part.begin(), part.end());
    store(filling, {carry_at_ / kCacheBlockNbytes, ceil_div(whole_end, kCacheBlockNbytes)}, all, {},
          stop);
    carry_.clear();
    carry_at_ = whole_end;
  }
  const uint64_t from = std::max(offset, carry_at_ + carry_.size());
  for (const Slice& slice : part_of(slices, from - offset, end - from))
    carry_.insert(carry_.end(), slice.begin(), slice.end());
}

void CacheSource::fill(const std::stop_token& stop) {
  patient_ = true;
  if (!network_) throw Error(Errc::invalid_argument, name_ + ": nothing can be fetched offline");
  const SourceTraits traits = network_->traits();
  const uint64_t unit = align_up(std::max<uint64_t>(traits.unit_nbytes, 1), kCacheBlockNbytes);
  const uint64_t units = ceil_div(key_.nbytes, unit);
  const unsigned workers = traits.sequential ? 1 : std::max(1U, traits.concurrency);
  for_each_index(units, workers, stop, [&](size_t i, const std::stop_token& stop_all) {
    const uint64_t begin = i * unit;
    const uint64_t nbytes = std::min(unit, key_.nbytes - begin);
    const auto filling = this->filling();
    if (!filling || !filling->is_open() || is_present(begin, nbytes)) return;
    std::vector<std::byte> buffer(static_cast<size_t>(nbytes));
    read_at(begin, Slice(buffer), stop_all);
  });
  const auto filling = this->filling();
  if (filling && !filling->finish(stop)) throw Error(Errc::cancelled, "cancelled");
  if (!filling || !filling->entry().is_complete() || !filling->make_durable()) {
    const std::string why = trouble();
    throw Error(Errc::io,
                name_ + ": only " + std::to_string(present_nbytes()) + " of " +
                    std::to_string(key_.nbytes) +
                    " bytes could be stored: " + (why.empty() ? "the disk refused" : why),
                name_);
  }
}

}  // namespace tensorizer::io
