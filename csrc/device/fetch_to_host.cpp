#include "device/fetch_to_host.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/run_units.h"

namespace tensorizer::device {
namespace {

// What is fetched to one buffer.
struct FetchUnit {
  std::vector<CopyPiece> pieces;
  std::vector<std::byte*> places;  // where each piece goes
};

std::vector<FetchUnit> units_of(std::span<const HostCopy> copies, uint64_t room) {
  std::vector<FetchUnit> units;
  uint64_t used = room;
  for (const HostCopy& copy : copies) {
    for (uint64_t done = 0; done < copy.nbytes;) {
      if (used == room) {
        units.emplace_back();
        used = 0;
      }
      const uint64_t nbytes = std::min(room - used, copy.nbytes - done);
      units.back().pieces.push_back({used, copy.device_address + done, nbytes});
      units.back().places.push_back(copy.to + done);
      used += nbytes;
      done += nbytes;
    }
  }
  return units;
}

class Fetcher final : public UnitWorker {
 public:
  Fetcher(const std::vector<FetchUnit>& units, CopyEngine& engine, const std::stop_token& stop)
      : units_(units), copier_(engine.make_copier(false)), stop_(stop) {}

  void process(size_t number) override {
    std::span<std::byte> buffer = copier_->try_acquire();
    if (buffer.empty()) {
      copy_fetched();  // before its buffer may be another's
      buffer = next_buffer(*copier_, stop_, [] {});
    }
    copier_->begin_fetch(units_[number].pieces, stop_);
    copy_fetched();
    fetched_ = {&units_[number], buffer};
  }

  void finish() override {
    copy_fetched();
    copier_->finish(stop_);
  }

 private:
  void copy_fetched() {
    if (!fetched_) return;
    const auto [unit, buffer] = *std::exchange(fetched_, std::nullopt);
    copier_->end_fetch(stop_);
    for (size_t i = 0; i < unit->pieces.size(); ++i)
      std::memcpy(unit->places[i], buffer.data() + unit->pieces[i].buffer_offset,
                  unit->pieces[i].nbytes);
  }

  const std::vector<FetchUnit>& units_;
  const std::unique_ptr<Copier> copier_;
  const std::stop_token stop_;
  std::optional<std::pair<const FetchUnit*, std::span<std::byte>>> fetched_;
};

}  // namespace

void fetch_to_host(std::span<const HostCopy> copies, CopyEngine& engine, unsigned workers,
                   const std::stop_token& stop) {
  const std::vector<FetchUnit> units = units_of(copies, engine.buffer_nbytes());
  std::atomic<size_t> next{0};
  run_units(units.size(), next, workers, stop, [&](const std::stop_token& token) {
    return std::make_unique<Fetcher>(units, engine, token);
  });
}

}  // namespace tensorizer::device
