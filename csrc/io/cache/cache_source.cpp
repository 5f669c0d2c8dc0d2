#include "io/cache/cache_source.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_units.h"
#include "io/buffers.h"
#include "io/cache/cache_disk.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstLook{5};
constexpr milliseconds kLastLook{50};
// How long a load waits for the source that makes the copy, after that one's last byte.
constexpr milliseconds kPatience{5000};
constexpr uint64_t kLookNbytes = uint64_t{64} << 10;
constexpr uint64_t kMostSkippedNbytes = uint64_t{16} << 20;
constexpr uint64_t kMostBehindNbytes = uint64_t{4} << 10;

// Bytes that a load of the whole object may leave out, such as its index and gaps between records.
uint64_t most_missing(uint64_t nbytes) noexcept { return nbytes / 16 + (uint64_t{64} << 10); }

}  // namespace

CacheSource::CacheSource(std::shared_ptr<CacheFolder> folder, CacheKey key,
                         std::shared_ptr<RangeSource> network, std::string name)
    : folder_(std::move(folder)),
      key_(std::move(key)),
      network_(std::move(network)),
      name_(std::move(name)) {}

std::shared_ptr<CacheSource> CacheSource::open(std::shared_ptr<CacheFolder> folder, CacheKey key,
                                               std::shared_ptr<RangeSource> network,
                                               std::string name) {
  std::shared_ptr<CacheSource> source(
      new CacheSource(std::move(folder), std::move(key), std::move(network), std::move(name)));
  const CacheKey& k = source->key_;
  if (source->network_) check_descriptors();
  if (auto entry = source->folder_->open_entry(k.location, k.version, k.nbytes)) {
    UniqueFd copy = entry->open_copy();
    source->was_complete_ = static_cast<bool>(copy);
    if (copy) source->use(std::move(entry), std::move(copy));
  }
  return source->was_complete_ || source->network_ ? source : nullptr;
}

void CacheSource::use(std::shared_ptr<CacheEntry> entry, UniqueFd copy) {
  if (!key_.about.empty()) entry->touch();
  MutexLock lock(mutex_);
  disk_ = std::make_shared<FileSource>(std::move(copy), name_);
  entry_ = std::move(entry);
}

// An entry takes three descriptors. Half of all descriptors are for connections and other files.
void CacheSource::check_descriptors() {
  struct rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const UniqueFd lowest(::open("/", O_PATH | O_CLOEXEC));  // the system gives the lowest
  if (!lowest || static_cast<rlim_t>(lowest.get()) >= limit.rlim_cur / 2)
    throw Error(Errc::io, "more than half of the " + std::to_string(limit.rlim_cur) +
                              " descriptors that the process may have (ulimit -n) are in use");
}

CacheSource::~CacheSource() { release(); }

std::shared_ptr<FileSource> CacheSource::disk() const {
  MutexLock lock(mutex_);
  return disk_;
}

std::shared_ptr<CacheCopy> CacheSource::copy() const {
  if (!owner_.is_this_one()) return nullptr;
  MutexLock lock(mutex_);
  return copy_;
}

void CacheSource::release() noexcept {
  if (!owner_.is_this_one()) return;
  try {  // an object that came whole with the opening costs no request
    if (view(0, key_.nbytes) != nullptr) begin_load(milliseconds(0), {});
  } catch (const std::exception&) {  // there is no copy then
  }
  if (const auto copy = this->copy()) {
    complete(*copy);
    copy->end();
  }
  MutexLock lock(mutex_);
  if (entry_) entry_->unlock();
}

void CacheSource::close() noexcept {
  release();
  {
    MutexLock lock(mutex_);
    disk_ = nullptr;
    entry_ = nullptr;
  }
  if (network_) network_->close();
}

SourceTraits CacheSource::traits() const {
  // As it was at the opening: readers rely on an answer that does not change.
  if (const auto disk = this->disk(); disk && was_complete_) return disk->traits();
  return network_ ? network_->traits() : SourceTraits{};
}

const std::byte* CacheSource::view(uint64_t offset, uint64_t nbytes) noexcept {
  return network_ ? network_->view(offset, nbytes) : nullptr;
}

uint64_t CacheSource::bytes_read() const noexcept {
  return from_disk_.load() + (network_ ? network_->bytes_read() : 0);
}

uint64_t CacheSource::stored_nbytes() const {
  const auto copy = this->copy();
  return copy && copy->trouble().empty() ? key_.nbytes : 0;
}

std::string CacheSource::trouble() const {
  if (const auto copy = this->copy()) return copy->trouble();
  MutexLock lock(mutex_);
  return trouble_;
}

void CacheSource::make_none(const std::string& why) {
  MutexLock lock(mutex_);
  trouble_ = why;
}

void CacheSource::write_about(const std::string& about) noexcept {
  MutexLock lock(mutex_);
  if (entry_) entry_->write_about(about);
}

bool CacheSource::drop_copy() noexcept {
  // Bytes of the network that failed a check would be damaged in the cache, too.
  if (const auto copy = this->copy()) copy->discard("what it holds is damaged");
  if (from_disk_.load() == 0) return false;
  try {
    return folder_->remove(key_.location, key_.version, /*force=*/true);
  } catch (const std::exception&) {
    return false;
  }
}

// -- reading -------------------------------------------------------------------------------------

void CacheSource::read_at(uint64_t offset, std::span<const Buffer> buffers,
                          const std::stop_token& stop) {
  const uint64_t nbytes = total_nbytes(buffers);
  if (offset > key_.nbytes || nbytes > key_.nbytes - offset)
    throw_truncated(name_, offset, nbytes, key_.nbytes);
  if (nbytes == 0) return;
  if (const auto disk = this->disk(); disk && read_disk(*disk, offset, buffers, stop)) return;
  if (!network_)
    throw Error(Errc::io,
                name_ + ": bytes " + std::to_string(offset) + " to " +
                    std::to_string(offset + nbytes) +
                    " cannot be read from the cache any more, and offline is set",
                name_, offset);
  const auto copy = this->copy();
  if (!copy || !copy->is_open()) return network_->read_at(offset, buffers, stop);
  // A server without ranges sends skipped bytes anyway: they are read for the copy, and so are the
  // few bytes behind the last record.
  std::vector<std::byte> skipped, behind;
  if (network_->traits().sequential) {
    for (const auto& [begin, end] : copy->missing()) {
      if (begin >= offset) break;
      if (end >= offset && offset - begin <= kMostSkippedNbytes)
        skipped.resize(static_cast<size_t>(offset - begin));
    }
  }
  std::vector<Buffer> all;
  all.reserve(buffers.size() + 2);
  if (!skipped.empty()) all.emplace_back(skipped);
  all.insert(all.end(), buffers.begin(), buffers.end());
  const uint64_t left = key_.nbytes - offset - nbytes;
  if (left > 0 && left <= kMostBehindNbytes) {
    behind.resize(static_cast<size_t>(left));
    all.emplace_back(behind);
  }
  offset -= skipped.size();
  const uint64_t wanted = total_nbytes(all);
  if (network_->read_with_progress(offset, all, stop, [&] { copy->show_progress(); }) < wanted)
    throw_truncated(name_, offset, wanted, network_->size().value_or(key_.nbytes));
  copy->add(offset, all, patient_, stop);
}

uint64_t CacheSource::read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) {
  begin_load(key_.nbytes, stop);
  return RangeSource::read_up_to(offset, into, stop);
}

// False: the disk failed, and the entry was removed.
bool CacheSource::read_disk(FileSource& disk, uint64_t offset, std::span<const Buffer> buffers,
                            const std::stop_token& stop) {
  try {
    disk.read_at(offset, buffers, stop);
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    CacheDisk::instance().note({folder_->path(), error.what()});
    folder_->remove(key_.location, key_.version, /*force=*/true);
    MutexLock lock(mutex_);
    disk_ = nullptr;
    return false;
  }
  from_disk_ += total_nbytes(buffers);
  return true;
}

// -- making a copy -------------------------------------------------------------------------------

void CacheSource::begin_load(uint64_t nbytes, const std::stop_token& stop) {
  const bool is_whole = nbytes >= key_.nbytes || key_.nbytes - nbytes <= most_missing(key_.nbytes);
  if (is_whole) begin_load(kPatience, stop);
}

void CacheSource::begin_load(milliseconds patience, const std::stop_token& stop) {
  if (!network_ || disk() || !owner_.is_this_one() || key_.about.empty() ||
      has_begun_.exchange(true))
    return;
  try {
    begin_copy(patience, stop);
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    make_none(error.what());
    CacheDisk::instance().note({folder_->path(), error.what()});
  }
}

void CacheSource::begin_copy(milliseconds patience, const std::stop_token& stop) {
  const char* const no_room = "the cache has no room within its limits";
  if (key_.limits.max_nbytes && key_.nbytes > *key_.limits.max_nbytes) return make_none(no_room);
  auto entry = folder_->make_entry(key_.location, key_.version, key_.nbytes, key_.about);
  if (!entry) return make_none("other processes remove what they find");
  if (!wait_for_turn(*entry, patience, stop))
    return make_none(
        "another process stores it, and no byte has come to that one for some seconds");
  if (UniqueFd copy = entry->open_copy()) {  // of the source that had its turn before
    entry->end_copy();
    return use(std::move(entry), std::move(copy));
  }
  std::shared_ptr<CacheCopy> copy;
  std::exception_ptr error;
  try {
    if (folder_->make_room(key_.nbytes, key_.limits))
      copy = std::make_shared<CacheCopy>(folder_, entry, key_);
  } catch (const Error&) {
    error = std::current_exception();
  }
  if (!copy) {
    entry->unlock();
    entry = nullptr;  // closes its lock file
    folder_->remove(key_.location, key_.version, /*force=*/false);
    if (error) std::rethrow_exception(error);
    return make_none(no_room);
  }
  add_head(*copy, stop);
  MutexLock lock(mutex_);
  copy_ = std::move(copy);
}

bool CacheSource::wait_for_turn(CacheEntry& entry, milliseconds patience,
                                const std::stop_token& stop) {
  int64_t seen = entry.last_progress();
  Clock::time_point until = Clock::now() + patience;
  for (milliseconds pause = kFirstLook; !entry.begin_copy();
       pause = std::min(pause * 2, kLastLook)) {
    if (const int64_t progress = entry.last_progress(); progress != seen) {
      seen = progress;
      until = Clock::now() + patience;
    }
    if (Clock::now() >= until) return false;
    {
      MutexLock lock(mutex_);
      changed_.wait_until(mutex_, stop, Clock::now() + pause, [] { return false; });
    }
    throw_if_stopped(stop);
  }
  entry.show_progress();
  return true;
}

// The bytes that came with the opening.
void CacheSource::add_head(CacheCopy& copy, const std::stop_token& stop) {
  uint64_t nbytes = 0;
  while (nbytes < key_.nbytes) {
    const uint64_t next = std::min(nbytes + kLookNbytes, key_.nbytes);
    if (network_->view(0, next) == nullptr) break;
    nbytes = next;
  }
  if (nbytes == 0) return;
  // A buffer is not const; nobody writes here.
  const Buffer head(const_cast<std::byte*>(network_->view(0, nbytes)), static_cast<size_t>(nbytes));
  copy.add(0, std::span<const Buffer>(&head, 1), patient_, stop);
}

// Reads the bytes that no reader wanted, if they are few.
void CacheSource::complete(CacheCopy& copy) {
  if (!copy.is_open()) return;
  try {
    const auto missing = copy.missing();
    uint64_t nbytes = 0;
    for (const auto& [begin, end] : missing) nbytes += end - begin;
    if (nbytes > most_missing(key_.nbytes)) return;
    const bool goes_back = missing.size() > 1 || missing.front().second != key_.nbytes;
    if (network_->traits().sequential && goes_back) return;
    for (const auto& [begin, end] : missing) {
      std::vector<std::byte> bytes(static_cast<size_t>(end - begin));
      const Buffer all(bytes);
      network_->read_at(begin, all, {});
      copy.add(begin, std::span<const Buffer>(&all, 1), patient_, {});
    }
  } catch (const std::exception&) {  // there is no copy then
  }
}

void CacheSource::fill(const std::stop_token& stop) {
  if (!network_) throw Error(Errc::invalid_argument, name_ + ": nothing can be fetched offline");
  patient_ = true;
  begin_load(key_.nbytes, stop);
  if (disk()) return;
  const auto copy = this->copy();
  if (copy) {
    const SourceTraits traits = network_->traits();
    const uint64_t unit = std::max<uint64_t>(traits.unit_nbytes, 1);
    const unsigned workers = traits.sequential ? 1 : std::max(1U, traits.concurrency);
    std::vector<std::pair<uint64_t, uint64_t>> units;
    for (auto [begin, end] : copy->missing())
      for (; begin < end; begin = units.back().second)
        units.emplace_back(begin, std::min(end, begin + unit));
    for_each_index(units.size(), workers, stop, [&](size_t i, const std::stop_token& stop_all) {
      if (!copy->is_open()) return;
      std::vector<std::byte> buffer(static_cast<size_t>(units[i].second - units[i].first));
      read_at(units[i].first, Buffer(buffer), stop_all);
    });
    copy->end();
    if (!copy->finish(stop)) throw Error(Errc::cancelled, "cancelled");
    if (copy->is_published()) return;
  }
  throw Error(Errc::io, name_ + " could not be stored: " + trouble(), name_);
}

}  // namespace tensorizer::io
