#include "load/staged_load.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "core/checked_math.h"
#include "core/sync.h"
#include "crypto/secret_buffer.h"
#include "load/chunks_for_device.h"
#include "load/payload_cipher.h"

namespace tensorizer::load {

struct StagedLoad::Shared {
  explicit Shared(LoadJob& load) : job(load), accepted(load.targets.size()) {
    if (job.opened->prologue.has_crypt_info())
      cipher = std::make_unique<PayloadCipher>(*job.options.keys, job.targets.size());
  }

  void note_accepted(uint32_t target) {
    {
      MutexLock lock(mutex);
      accepted[target].store(true, std::memory_order_release);
    }
    changed.notify_all();
  }

  // The header of a tensor may lie in an earlier unit, which somebody else is reading.
  void wait_for_header(uint32_t target, const std::stop_token& stop) {
    const auto is_here = [&] { return accepted[target].load(std::memory_order_acquire); };
    if (is_here()) return;
    MutexLock lock(mutex);
    if (!changed.wait(mutex, stop, is_here)) throw Error(Errc::cancelled, "cancelled");
  }

  // Where the ciphertext of a gathered tensor comes together: its destination, on the host.
  std::byte* gathering_place(uint32_t target) {
    if (job.options.engine == nullptr) return job.targets[target].destination.data;
    MutexLock lock(mutex);
    crypto::SecretBuffer& place = gathered[target];
    if (place.size() == 0) place = crypto::SecretBuffer(job.entry_of(target).data_nbytes);
    return place.data();
  }

  LoadJob& job;
  std::unique_ptr<PayloadCipher> cipher;    // set iff the file has crypt_info
  std::vector<std::atomic<bool>> accepted;  // per target: its header was parsed
  Mutex mutex;
  CondVar changed;
  std::map<uint32_t, crypto::SecretBuffer> gathered;  // guarded by mutex; device loads
};

class StagedLoad::Worker final : public UnitWorker {
 public:
  Worker(Shared& shared, const std::stop_token& stop)
      : shared_(shared), job_(shared.job), stop_(stop) {
    if (job_.options.engine != nullptr)
      lane_ = job_.options.engine->make_lane(shared_.cipher != nullptr);
  }

  bool help() override { return job_.digester && job_.digester->help(); }

  void prepare() override {
    if (lane_) take_buffer();
  }

  void process(size_t number) override {
    const Unit& unit = job_.plan.units[number];
    const std::byte* const image = job_.in_order(number, stop_, [&] { return read_image(unit); });
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      const std::span<const std::byte> stored(image + piece.unit_offset, piece.nbytes);
      if (piece.kind == Piece::Kind::header) {
        accept_header(piece.target, stored);
      } else if (shared_.cipher) {
        decrypt(piece, stored);
      } else {
        deliver(piece, stored);
      }
    }
    if (job_.digester) job_.digester->add_whole(whole_);
    whole_.clear();
    send();
    for (const uint32_t target : complete_) send_gathered(target);
    complete_.clear();
    job_.nbytes_done.fetch_add(unit.payload_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    if (job_.digester) job_.digester->finish(stop_);
    if (lane_) lane_->finish(stop_);
  }

 private:
  // A buffer goes on once its copies are done and its steps are hashed. Two or three are under way,
  // so that a worker has steps of several tensors to hash side by side.
  void take_buffer() {
    buffer_ = device::next_buffer(*lane_, stop_, [this] {
      if (job_.digester) hashing_.release_oldest(stop_);
    });
    if (job_.digester) hashing_.begin_buffer();
  }

  // All bytes of the unit, as they are in the file.
  const std::byte* read_image(const Unit& unit) {
    io::Slice into;
    if (lane_ && !shared_.cipher && unit.payload_nbytes > 0) {
      into = buffer_.first(unit.nbytes);
    } else {
      if (const std::byte* there = job_.source.view(unit.offset, unit.nbytes)) return there;
      if (image_.size() < unit.nbytes) image_.resize(unit.nbytes);
      into = std::span(image_).first(unit.nbytes);
    }
    job_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  void accept_header(uint32_t target, std::span<const std::byte> bytes) {
    format::RecordHeader header;
    if (const auto start = job_.accept_header(target, bytes, header))
      whole_.push_back({target, *start, {}});
    if (shared_.cipher) {
      job_.naming(target, [&] {
        shared_.cipher->accept(target, header, std::max(job_.plan.hash_steps[target], 1U));
      });
    }
    if (job_.plan.hash_steps[target] > 0) shared_.note_accepted(target);
  }

  void decrypt(const Piece& piece, std::span<const std::byte> stored) {
    if (job_.plan.hash_steps[piece.target] > 0) shared_.wait_for_header(piece.target, stop_);
    if (shared_.cipher->is_gathered(piece.target)) {
      gather(piece, stored);
      return;
    }
    if (lane_ && opens_on_device(piece, stored)) return;
    std::byte* const plain =
        lane_ ? buffer_.data() + piece.unit_offset
              : job_.targets[piece.target].destination.data + piece.target_offset;
    job_.naming(piece.target, [&] {
      shared_.cipher->open(piece.target, piece.target_offset, stored, plain, stop_);
    });
    deliver(piece, {plain, piece.nbytes});
  }

  // Ciphertext goes to the device where the kernels can open it and nobody hashes the plaintext.
  bool opens_on_device(const Piece& piece, std::span<const std::byte> stored) {
    const std::byte* const to = job_.targets[piece.target].destination.data + piece.target_offset;
    if (job_.digester ||
        !sealed_.add(*lane_, *shared_.cipher, piece.target, piece.target_offset, piece.nbytes, to))
      return false;
    std::memcpy(buffer_.data() + piece.unit_offset, stored.data(), stored.size());
    deliver(piece, stored);
    return true;
  }

  // Plaintext goes to the hashes, and to the device where that is where it goes.
  void deliver(const Piece& piece, std::span<const std::byte> plain) {
    if (job_.digester) digest(piece, plain);
    if (!lane_) return;
    std::byte* const to = job_.targets[piece.target].destination.data + piece.target_offset;
    copies_.push_back({piece.unit_offset, to, piece.nbytes});
  }

  void digest(const Piece& piece, std::span<const std::byte> plain) {
    if (job_.plan.hash_steps[piece.target] == 0) {
      whole_.back().bytes = plain;  // its header came right before it
      return;
    }
    shared_.wait_for_header(piece.target, stop_);
    job_.digester->add(piece.target, piece.step, plain);
    if (lane_) hashing_.add({piece.target, piece.step});
  }

  void send() {
    if (!copies_.empty()) {
      const auto refuse = [this](uint32_t target, uint64_t chunk) {
        job_.naming(target, [&] { shared_.cipher->refuse(target, chunk); });
      };
      sealed_.send(*lane_, copies_, refuse, stop_);
    }
    copies_.clear();
  }

  // --- chunks that straddle pieces ---

  // Whoever brings the last piece decrypts the whole, in place.
  void gather(const Piece& piece, std::span<const std::byte> stored) {
    const uint32_t target = piece.target;
    std::byte* const place = shared_.gathering_place(target);
    std::memcpy(place + piece.target_offset, stored.data(), stored.size());
    if (!shared_.cipher->is_last_piece(target)) return;
    const std::span<std::byte> whole(place, job_.entry_of(target).data_nbytes);
    job_.naming(target, [&] { shared_.cipher->open(target, 0, whole, place, stop_); });
    if (job_.digester) digest_gathered(target, whole);
    if (lane_) complete_.push_back(target);
  }

  void digest_gathered(uint32_t target, std::span<const std::byte> whole) {
    const uint32_t steps = job_.plan.hash_steps[target];
    if (steps == 0) {
      whole_.back().bytes = whole;
      return;
    }
    const uint64_t part = ceil_div(whole.size(), steps);
    for (uint32_t step = 0; step < steps; ++step) {
      const uint64_t at = std::min<uint64_t>(step * part, whole.size());
      job_.digester->add(target, step,
                         whole.subspan(at, std::min<uint64_t>(part, whole.size() - at)));
    }
  }

  void send_gathered(uint32_t target) {
    const std::byte* const plain = shared_.gathering_place(target);
    std::byte* const to = job_.targets[target].destination.data;
    const uint64_t nbytes = job_.entry_of(target).data_nbytes;
    for (uint64_t done = 0; done < nbytes;) {
      take_buffer();
      const uint64_t n = std::min<uint64_t>(buffer_.size(), nbytes - done);
      std::memcpy(buffer_.data(), plain + done, n);
      const device::CopyPiece copy{0, to + done, n};
      lane_->send({&copy, 1}, stop_);
      done += n;
    }
    const uint32_t steps = job_.plan.hash_steps[target];
    if (job_.digester && steps > 0) job_.digester->wait(target, steps - 1, stop_);
    MutexLock lock(shared_.mutex);
    shared_.gathered.erase(target);
  }

  Shared& shared_;
  LoadJob& job_;
  const std::stop_token stop_;
  std::unique_ptr<device::Lane> lane_;  // set iff bound for a device
  std::span<std::byte> buffer_;         // of the lane, for the unit at hand
  std::vector<std::byte> image_;
  std::vector<digest::RecordDigester::Whole> whole_;
  std::vector<device::CopyPiece> copies_;
  ChunksForDevice sealed_;                               // of copies_, what the device opens
  digest::StepsInBuffers hashing_{job_.digester.get()};  // behind the buffers
  std::vector<uint32_t> complete_;  // gathered device tensors that this unit completed
};

StagedLoad::StagedLoad(LoadJob& job) : shared_(std::make_unique<Shared>(job)) {}
StagedLoad::~StagedLoad() = default;

std::unique_ptr<UnitWorker> StagedLoad::make_worker(const std::stop_token& stop) {
  return std::make_unique<Worker>(*shared_, stop);
}

}  // namespace tensorizer::load
