#include "io/cache/cache_filling.h"

#include <algorithm>
#include <system_error>

#include "io/cache/cache_disk.h"

namespace tensorizer::io {

bool CacheFilling::add(BlockRun run, std::span<const Slice> bytes, CacheEntry::Claim claim,
                       bool patient, const std::stop_token& stop) {
  if (!is_open()) return true;
  const uint64_t nbytes = total_nbytes(bytes);
  CacheDisk& disk = CacheDisk::instance();
  std::shared_ptr<Waiting> waiting;
  try {
    CacheDisk::Buffer copy = disk.borrow(nbytes, patient, stop);
    if (!copy) return false;
    waiting = std::make_shared<Waiting>(Waiting{run, std::move(copy), nbytes, std::move(claim)});
    uint64_t done = 0;
    for (const Slice& slice : bytes) {
      std::ranges::copy(slice, waiting->bytes.get() + done);
      done += slice.size();
    }
    {
      MutexLock lock(mutex_);
      waiting_[run.end - 1] = waiting;
    }
    stored_ += nbytes;
    disk.write([self = shared_from_this(), waiting] { self->write(*waiting); });
    entry_->wake();                  // who waits for these blocks in this process finds them here
  } catch (const std::exception&) {  // no memory, or no thread
    if (waiting) write(*waiting);
  }
  return true;
}

std::shared_ptr<const CacheFilling::Waiting> CacheFilling::waiting_at(uint64_t block) {
  MutexLock lock(mutex_);
  const auto found = waiting_.lower_bound(block);
  return found != waiting_.end() && found->second->run.begin <= block ? found->second : nullptr;
}

void CacheFilling::write(Waiting& waiting) noexcept {
  uint64_t end = waiting.run.begin;
  try {
    if (is_open() && has_room(waiting.nbytes)) {
      if (const int error = entry_->write(waiting.run, waiting.all(), end); error != 0)
        stop(std::generic_category().message(error));
    }
  } catch (const std::exception& error) {
    stop(error.what());
  }
  if (end != waiting.run.end) {
    const uint64_t lost =
        waiting.nbytes - std::min(waiting.nbytes, (end - waiting.run.begin) * kCacheBlockNbytes);
    stored_ -= lost;
    left_out_ += lost;
  }
  const CacheEntry::Claim ends = std::move(waiting.claim);
  {
    MutexLock lock(mutex_);
    const auto found = waiting_.find(waiting.run.end - 1);
    if (found != waiting_.end() && found->second.get() == &waiting) waiting_.erase(found);
  }
  written_.notify_all();
}

bool CacheFilling::has_room(uint64_t nbytes) {
  CacheDisk& disk = CacheDisk::instance();
  if (disk.take_room(folder_->path(), nbytes)) return true;
  const uint64_t missing = entry_->nbytes() - entry_->present_nbytes();
  const uint64_t step = std::max(nbytes, std::min(kStepNbytes, missing));
  if (!folder_->make_room(step, key_.limits)) {
    stop("the cache has no room within its limits", false);
    return false;
  }
  disk.set_room(folder_->path(), step - nbytes);
  return true;
}

void CacheFilling::stop(const std::string& why, bool is_trouble) noexcept {
  if (!open_.exchange(false)) return;
  try {
    {
      MutexLock lock(mutex_);
      trouble_ = why;
    }
    if (is_trouble) CacheDisk::instance().note({folder_->path(), why});
  } catch (const std::bad_alloc&) {  // the storing has ended all the same
  }
}

bool CacheFilling::discard(const std::string& why, bool is_trouble) noexcept {
  stop(why, false);
  try {
    if (is_trouble) CacheDisk::instance().note({folder_->path(), why});
    return folder_->remove(key_.location, key_.version, true);
  } catch (const std::exception&) {
    return false;
  }
}

std::string CacheFilling::trouble() const {
  MutexLock lock(mutex_);
  return trouble_;
}

bool CacheFilling::finish(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  return written_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) { return waiting_.empty(); });
}

void CacheFilling::rest() noexcept {
  entry_->leave();
  {
    MutexLock lock(mutex_);
    if (waiting_.empty()) return settle();
  }
  try {
    CacheDisk::instance().write([self = shared_from_this()] { self->settle(); });
  } catch (const std::exception&) {  // another one who opens the entry does it
  }
}

bool CacheFilling::make_durable() noexcept {
  const int error = entry_->make_durable();
  if (error == 0) return true;
  try {
    discard("cannot sync: " + std::generic_category().message(error));
  } catch (const std::bad_alloc&) {  // without a name for it, no bit says that its bytes are there
  }
  return false;
}

void CacheFilling::settle() noexcept {
  try {
    if (entry_->take_unsynced())
      CacheDisk::instance().sync([self = shared_from_this()] { self->make_durable(); });
  } catch (const std::exception&) {  // as above
  }
}

}  // namespace tensorizer::io
