#include "load/concurrent_loads.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/run_units.h"
#include "load/device_worker.h"
#include "load/host_worker.h"
#include "load/session_plan.h"
#include "load/unit_order.h"
#include "load/wipe_destinations.h"

namespace tensorizer::load {
namespace {

constexpr unsigned kMostWaitingWorkers = 64;
// What is allocated between two looks at signals and other work of the calling thread.
constexpr size_t kGroupsAtOnce = 16;
constexpr std::chrono::milliseconds kAllocatingAtOnce{2};

bool places(const LoadSession& session) {
  return std::ranges::any_of(session.plan.units,
                             [](const Unit& unit) { return unit.placed_nbytes > 0; });
}

class ConcurrentLoads {
 public:
  ConcurrentLoads(std::span<LoadSession* const> sessions, unsigned at_once,
                  const OnCaller& on_caller, const std::stop_token& stop)
      : sessions_(sessions), at_once_(at_once), on_caller_(on_caller), stop_(stop) {}

  void run() {
    try {
      try {
        while (begin_plans()) run_plans();
        for (const LoadSession* session : sessions_) session->source.check_unchanged();
      } catch (const Error& error) {
        explain(error);
        throw;
      }
    } catch (...) {
      for (LoadSession* session : sessions_) wipe_destinations(*session);
      throw;
    }
  }

 private:
  // Loads that share their workers.
  struct Pool {
    std::vector<LoadSession*> sessions;
    bool to_device = false;
    bool is_shared = false;
    unsigned workers = 0;
    std::vector<NumberedUnit> order;
    std::atomic<size_t> next{0};
  };

  bool begin_plans() {
    pools_.clear();
    auto shared = std::make_unique<Pool>();
    shared->to_device = shared->is_shared = true;
    for (LoadSession* session : sessions_) {
      if (!begin_next_plan(*session)) continue;
      const bool to_device = session->options.engine != nullptr && places(*session);
      if (to_device && !session->source.traits().sequential) {
        shared->sessions.push_back(session);
        continue;
      }
      pools_.push_back(std::make_unique<Pool>());
      pools_.back()->sessions.push_back(session);
      pools_.back()->to_device = to_device;
    }
    if (!shared->sessions.empty()) pools_.push_back(std::move(shared));
    for (const auto& pool : pools_) {
      pool->workers = workers_of(*pool);
      for (LoadSession* session : pool->sessions) divide_read_buffers(*session, pool->workers);
      order(*pool);
    }
    return !pools_.empty();
  }

  // As many as the sources can answer at once, and where some need the processors: as many as there
  // are of these.
  static unsigned workers_of(const Pool& pool) {
    std::map<const io::RangeSource*, unsigned> waiting;
    unsigned others = 0, most = 0;
    uint64_t read_buffers = kMostWaitingWorkers;
    size_t units = 0;
    for (const LoadSession* session : pool.sessions) {
      const unsigned useful = useful_workers(*session);
      if (session->source.traits().remote) {
        unsigned& of_source = waiting[&session->source];
        of_source = std::max(of_source, useful);
        if (session->options.engine != nullptr)
          read_buffers =
              std::min(read_buffers, kReadBuffersNbytes / session->options.engine->buffer_nbytes());
      } else {
        others = std::max(others, useful);
      }
      if (session->options.max_workers > 0)
        most =
            most == 0 ? session->options.max_workers : std::min(most, session->options.max_workers);
      units += session->plan.units.size();
    }
    unsigned workers = 0;
    for (const auto& [source, useful] : waiting) workers += useful;
    if (waiting.size() > 1 || pool.is_shared)
      workers = std::min(workers, static_cast<unsigned>(std::max<uint64_t>(1, read_buffers)));
    workers += others;
    if (most > 0) workers = std::min(workers, most);
    return static_cast<unsigned>(std::clamp<size_t>(units, 1, std::max(workers, 1U)));
  }

  static void order(Pool& pool) {
    if (pool.sessions.empty()) return;
    if (pool.sessions.size() == 1) return order_streams(pool);
    std::vector<UnitsOfLoad> loads;
    loads.reserve(pool.sessions.size());
    for (const LoadSession* session : pool.sessions)
      loads.push_back({session->plan.units, &session->source, session->source.traits().remote});
    pool.order = order_units(loads);
  }

  void begin_loads() const {
    std::map<io::RangeSource*, uint64_t> nbytes;
    for (const auto& pool : pools_)
      for (const LoadSession* session : pool->sessions)
        for (const Unit& unit : session->plan.units) nbytes[&session->source] += unit.nbytes;
    for (const auto& [source, of_units] : nbytes) source->begin_load(of_units, stop_);
  }

  // Parts of the source that are read at the same pace.
  static void order_streams(Pool& pool) {
    const LoadPlan& plan = pool.sessions.front()->plan;
    const std::vector<uint32_t>& begins = plan.stream_begins;
    if (begins.size() < 2) return;
    const std::span<const Unit> units = plan.units;
    std::vector<UnitsOfLoad> parts;
    for (size_t i = 0; i < begins.size(); ++i) {
      const size_t end = i + 1 < begins.size() ? begins[i + 1] : units.size();
      parts.push_back({units.subspan(begins[i], end - begins[i])});
    }
    pool.order = order_units(parts);
    for (NumberedUnit& unit : pool.order) unit = {0, begins[unit.load] + unit.unit};
  }

  struct AtEnd {
    const Pool& pool;
    ~AtEnd() {
      for (LoadSession* const session : pool.sessions) session->source.end_load();
    }
  };

  // Only while the pool runs: a model may have hundreds of files, and a process few descriptors.
  static std::shared_ptr<void> open_streams(const Pool& pool) {
    const LoadSession* const session = pool.sessions.front();
    return session->plan.stream_begins.size() < 2 ? nullptr : session->source.open_streams();
  }

  static size_t unit_count(const Pool& pool) {
    return pool.order.empty() ? pool.sessions.front()->plan.units.size() : pool.order.size();
  }
  static NumberedUnit unit_at(const Pool& pool, size_t i) {
    return pool.order.empty() ? NumberedUnit{0, static_cast<uint32_t>(i)} : pool.order[i];
  }

  void run_plans() {
    begin_loads();
    const std::vector<Allocation> allocations = order_allocations();
    const auto run_pool = [&](size_t i, const std::stop_token& token) {
      Pool& pool = *pools_[i];
      const std::shared_ptr<void> streams = open_streams(pool);
      const AtEnd at_end{pool};
      run_units(unit_count(pool), pool.next, pool.workers, token, [&](const std::stop_token& t) {
        return pool.to_device ? make_device_worker(pool.sessions, pool.order, t)
                              : make_host_worker(*pool.sessions.front(), pool.order, t);
      });
    };
    if (pools_.size() == 1 && allocations.empty()) return run_pool(0, stop_);
    // Allocating comes first: where no thread can be had, it is over before the loads begin.
    const unsigned allocates = allocations.empty() ? 0 : 1;
    const unsigned shared = pools_.back()->is_shared ? 1 : 0;
    for_each_index(pools_.size() + allocates, at_once_ + allocates + shared, stop_,
                   [&](size_t i, const std::stop_token& token) {
                     if (i < allocates) return allocate(allocations, token);
                     run_pool(i - allocates, token);
                   });
  }

  // --- allocating ---

  struct Allocation {
    size_t first_use;
    LoadSession* session;
    size_t group;
  };

  // In the order in which units need the memory; memory that no unit needs comes last.
  std::vector<Allocation> order_allocations() const {
    std::vector<Allocation> all;
    for (const auto& pool : pools_) {
      std::vector<std::vector<size_t>> first_use(pool->sessions.size());
      bool any = false;
      for (size_t s = 0; s < pool->sessions.size(); ++s) {
        any = any || !pool->sessions[s]->groups.empty();
        first_use[s].assign(pool->sessions[s]->targets.size(), unit_count(*pool));
      }
      if (!any) continue;
      for (size_t i = unit_count(*pool); i-- > 0;) {
        const auto [load, unit] = unit_at(*pool, i);
        const LoadPlan& plan = pool->sessions[load]->plan;
        for (const Piece& piece : plan.pieces_of(plan.units[unit]))
          first_use[load][piece.target] = i;
      }
      for (size_t s = 0; s < pool->sessions.size(); ++s) {
        const std::vector<MemoryGroup>& groups = pool->sessions[s]->groups;
        for (size_t group = 0; group < groups.size(); ++group) {
          size_t first = unit_count(*pool);
          for (const MemoryGroup::Member& member : groups[group].members)
            first = std::min(first, first_use[s][member.target]);
          all.push_back({first, pool->sessions[s], group});
        }
      }
    }
    std::stable_sort(all.begin(), all.end(), [](const Allocation& a, const Allocation& b) {
      return a.first_use < b.first_use;
    });
    return all;
  }

  void allocate(const std::vector<Allocation>& all, const std::stop_token& token) {
    for (size_t next = 0; next < all.size();) {
      throw_if_stopped(token);
      const auto work = [&] { next = allocate_some(all, next); };
      if (on_caller_) {
        on_caller_(work);
      } else {
        work();
      }
    }
    for (const auto& pool : pools_)
      for (LoadSession* session : pool->sessions) session->groups.clear();
  }

  // From number `next` on; the number of the first that is left.
  static size_t allocate_some(const std::vector<Allocation>& all, size_t next) {
    const auto until = std::chrono::steady_clock::now() + kAllocatingAtOnce;
    std::map<LoadSession*, std::vector<size_t>> made;
    for (size_t count = 0; next < all.size() && count < kGroupsAtOnce; ++count, ++next) {
      all[next].session->allocate_group(all[next].group);
      made[all[next].session].push_back(all[next].group);
      if (std::chrono::steady_clock::now() >= until) {
        ++next;
        break;
      }
    }
    for (const auto& [session, groups] : made) {
      session->options.engine->order_after_caller();
      session->memory_is_ready(groups);
    }
    return next;
  }

  // --- failing ---

  // In the handler of `error`, with all workers gone: a source that changed meanwhile explains what
  // is wrong with its bytes.
  void explain(const Error& error) const {
    const bool of_bytes = error.code() == Errc::malformed || error.code() == Errc::truncated ||
                          error.code() == Errc::hash_mismatch || error.code() == Errc::crypto ||
                          error.code() == Errc::authentication;
    if (!of_bytes) return;
    for (const LoadSession* session : sessions_) {
      if (session->source.name() != error.source) continue;
      session->source.check_unchanged();
      drop_damaged_copy(session->source, error);
    }
  }

  const std::span<LoadSession* const> sessions_;
  const unsigned at_once_;
  const OnCaller& on_caller_;
  const std::stop_token& stop_;
  std::vector<std::unique_ptr<Pool>> pools_;
};

}  // namespace

void run_loads(std::span<LoadSession* const> sessions, unsigned at_once, const OnCaller& on_caller,
               const std::stop_token& stop) {
  ConcurrentLoads(sessions, at_once, on_caller, stop).run();
}

}  // namespace tensorizer::load
