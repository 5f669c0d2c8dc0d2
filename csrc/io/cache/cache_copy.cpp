#include "io/cache/cache_copy.h"

#include <algorithm>

#include "core/error.h"
#include "io/cache/cache_disk.h"

namespace tensorizer::io {

CacheCopy::CacheCopy(std::shared_ptr<CacheFolder> folder, std::shared_ptr<CacheEntry> entry,
                     const CacheKey& key, FileCalls& calls)
    : folder_(std::move(folder)), entry_(std::move(entry)), key_(key) {
  const std::string target = folder_->path_of({key.location, key.version}) + "/data";
  sink_ = FileSink::replace(target, {.access = FileAccess{.mode = 0600}, .calls = &calls});
  sink_->reserve(key.nbytes);
}

std::shared_ptr<FileSink> CacheCopy::sink() const {
  MutexLock lock(mutex_);
  return state_ == State::open || state_ == State::syncing ? sink_ : nullptr;
}

void CacheCopy::add(uint64_t offset, std::span<const Buffer> bytes, bool patient,
                    const std::stop_token& stop) {
  const uint64_t nbytes = total_nbytes(bytes);
  if (nbytes == 0 || !is_open()) return;
  try {
    std::shared_ptr<std::byte[]> copy = CacheDisk::instance().borrow(nbytes, patient, stop);
    if (!copy) {
      if (stop.stop_requested()) return;
      return give_up("the disk is " + std::to_string(CacheDisk::kLimitNbytes >> 20) +
                         " MiB behind; `tensorizer cache add` stores an object at the disk's pace",
                     true);
    }
    uint64_t done = 0;
    for (const Buffer& buffer : bytes) {
      std::ranges::copy(buffer, copy.get() + done);
      done += buffer.size();
    }
    CacheDisk::instance().write([self = shared_from_this(), copy, offset, nbytes] {
      self->write(offset, {copy.get(), static_cast<size_t>(nbytes)});
    });
    MutexLock lock(mutex_);
    added_.add(offset, offset + nbytes);
    if (state_ != State::open || !added_.contains(0, key_.nbytes)) return;
    state_ = State::syncing;
  } catch (const std::exception& error) {  // no memory, or no thread
    return give_up(error.what(), true);
  }
  try {  // behind all writes
    CacheDisk::instance().write([self = shared_from_this()] {
      try {
        CacheDisk::instance().sync([self] { self->publish(); });
      } catch (const std::exception& error) {
        self->give_up(error.what(), true);
      }
    });
  } catch (const std::exception& error) {
    give_up(error.what(), true);
  }
}

void CacheCopy::write(uint64_t offset, ConstBuffer bytes) noexcept {
  const std::shared_ptr<FileSink> sink = this->sink();
  if (!sink) return;
  try {
    sink->write_at(offset, bytes, {});
    show_progress();
  } catch (const std::exception& error) {
    give_up(error.what(), true);
  }
}

void CacheCopy::publish() noexcept {
  const std::shared_ptr<FileSink> sink = this->sink();
  if (!sink) return;
  try {
    sink->publish(key_.nbytes, {});
  } catch (const std::exception& error) {
    return give_up(error.what(), true);
  }
  bool is_left = false, is_wanted = false;
  {
    MutexLock lock(mutex_);
    is_wanted = state_ == State::syncing;
    if (is_wanted) state_ = State::published;
    is_left = has_ended_;
    sink_ = nullptr;
  }
  if (!is_wanted) return remove(/*force=*/true);  // discarded while it was synced
  entry_->end_copy();
  if (is_left) entry_->unlock();
  changed_.notify_all();
}

void CacheCopy::give_up(const std::string& why, bool is_trouble) noexcept {
  {
    MutexLock lock(mutex_);
    if (state_ == State::published || state_ == State::given_up) return;
    state_ = State::given_up;
    sink_ = nullptr;
    try {
      trouble_ = why;
      if (is_trouble) CacheDisk::instance().note({folder_->path(), why});
    } catch (const std::bad_alloc&) {  // it ends all the same
    }
  }
  entry_->end_copy();
  entry_->unlock();
  remove(/*force=*/false);  // fails if another source waits for its turn: that one goes on
  changed_.notify_all();
}

void CacheCopy::remove(bool force) noexcept {
  try {
    folder_->remove(key_.location, key_.version, force);
  } catch (const std::exception&) {  // a later sweep
  }
}

std::vector<std::pair<uint64_t, uint64_t>> CacheCopy::missing() const {
  MutexLock lock(mutex_);
  std::vector<std::pair<uint64_t, uint64_t>> found;
  for (uint64_t at = 0; (at = added_.first_missing(at, key_.nbytes)) < key_.nbytes;) {
    const uint64_t end = added_.first_present(at, key_.nbytes);
    found.emplace_back(at, end);
    at = end;
  }
  return found;
}

bool CacheCopy::is_open() const {
  MutexLock lock(mutex_);
  return state_ == State::open;
}

void CacheCopy::end() noexcept {
  bool is_partial = false, is_left = false;
  {
    MutexLock lock(mutex_);
    has_ended_ = true;
    is_partial = state_ == State::open;
    is_left = state_ == State::published;
  }
  if (is_partial) give_up("only a part of it was read", false);
  if (is_left) entry_->unlock();
}

bool CacheCopy::finish(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  return changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) {
    return state_ == State::published || state_ == State::given_up;
  });
}

bool CacheCopy::is_published() const {
  MutexLock lock(mutex_);
  return state_ == State::published;
}

void CacheCopy::discard(const std::string& why) noexcept {
  give_up(why, false);
  if (is_published()) remove(/*force=*/true);
}

std::string CacheCopy::trouble() const {
  MutexLock lock(mutex_);
  return trouble_;
}

}  // namespace tensorizer::io
