#include "load/load_together.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/run_units.h"
#include "load/load_worker.h"
#include "load/unit_order.h"

namespace tensorizer::load {
namespace {

constexpr unsigned kMostWaitingWorkers = 64;
// What is allocated between two looks at signals and other work of the calling thread.
constexpr size_t kGroupsAtOnce = 16;
constexpr std::chrono::milliseconds kAllocatingAtOnce{2};

}  // namespace

class Together {
 public:
  Together(std::span<LoadSession* const> sessions, unsigned at_once, const OnCaller& on_caller,
           const std::stop_token& stop)
      : sessions_(sessions), at_once_(at_once), on_caller_(on_caller), stop_(stop) {}

  void run() {
    try {
      try {
        while (begin_plans()) run_plans();
        for (const LoadSession* session : sessions_) session->job_.source.check_unchanged();
      } catch (const Error&) {
        explain();
        throw;
      }
    } catch (...) {
      for (LoadSession* session : sessions_) session->wipe_destinations();
      throw;
    }
  }

 private:
  // Loads that share their workers.
  struct Pool {
    std::vector<LoadSession*> sessions;
    bool is_shared = false;
    unsigned workers = 0;
    std::vector<NumberedUnit> order;
    std::atomic<size_t> next{0};
  };

  bool begin_plans() {
    pools_.clear();
    auto shared = std::make_unique<Pool>();
    shared->is_shared = true;
    for (LoadSession* session : sessions_) {
      const LoadJob& job = session->job_;
      auto own = std::make_unique<Pool>();
      const bool is_shared = job.options.engine != nullptr && !job.source.traits().sequential;
      (is_shared ? shared : own)->sessions.push_back(session);
      if (!is_shared) pools_.push_back(std::move(own));
    }
    if (!shared->sessions.empty()) pools_.push_back(std::move(shared));
    for (const auto& pool : pools_) {
      const unsigned workers = workers_of(*pool);
      std::erase_if(pool->sessions,
                    [&](LoadSession* session) { return !session->begin_plan(workers); });
      pool->workers = workers_of(*pool);
      order(*pool);
    }
    std::erase_if(pools_, [](const auto& pool) { return pool->sessions.empty(); });
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
      const LoadJob& job = session->job_;
      const unsigned useful = session->useful_workers();
      if (job.source.traits().waits) {
        unsigned& of_source = waiting[&job.source];
        of_source = std::max(of_source, useful);
        if (job.options.engine != nullptr)
          read_buffers =
              std::min(read_buffers, kReadBuffersNbytes / job.options.engine->buffer_nbytes());
      } else {
        others = std::max(others, useful);
      }
      if (job.options.max_workers > 0)
        most = most == 0 ? job.options.max_workers : std::min(most, job.options.max_workers);
      units += job.plan.units.size();
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
      loads.push_back(
          {session->job_.plan.units, &session->job_.source, session->job_.source.traits().waits});
    pool.order = order_units(loads);
  }

  void begin_loads() const {
    std::map<io::RangeSource*, uint64_t> nbytes;
    for (const auto& pool : pools_)
      for (const LoadSession* session : pool->sessions)
        for (const Unit& unit : session->job_.plan.units)
          nbytes[&session->job_.source] += unit.nbytes;
    for (const auto& [source, of_units] : nbytes) source->begin_load(of_units, stop_);
  }

  // Parts of the source that are read at the same pace.
  static void order_streams(Pool& pool) {
    const LoadPlan& plan = pool.sessions.front()->job_.plan;
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

  // Only while the pool runs: a model may have hundreds of files, and a process few descriptors.
  static std::shared_ptr<void> open_streams(const Pool& pool) {
    LoadJob& job = pool.sessions.front()->job_;
    return job.plan.stream_begins.size() < 2 ? nullptr : job.source.open_streams();
  }

  static size_t unit_count(const Pool& pool) {
    return pool.order.empty() ? pool.sessions.front()->job_.plan.units.size() : pool.order.size();
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
      run_units(unit_count(pool), pool.next, pool.workers, token,
                [&](const std::stop_token& t) { return std::make_unique<Worker>(*this, pool, t); });
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

  // In the order in which units need the memory; what none of them needs comes last.
  std::vector<Allocation> order_allocations() const {
    std::vector<Allocation> all;
    for (const auto& pool : pools_) {
      std::vector<std::vector<size_t>> first_use(pool->sessions.size());
      bool any = false;
      for (size_t s = 0; s < pool->sessions.size(); ++s) {
        any = any || !pool->sessions[s]->groups_.empty();
        first_use[s].assign(pool->sessions[s]->job_.targets.size(), unit_count(*pool));
      }
      if (!any) continue;
      for (size_t i = unit_count(*pool); i-- > 0;) {
        const auto [load, unit] = unit_at(*pool, i);
        const LoadPlan& plan = pool->sessions[load]->job_.plan;
        for (const Piece& piece : plan.pieces_of(plan.units[unit]))
          first_use[load][piece.target] = i;
      }
      for (size_t s = 0; s < pool->sessions.size(); ++s) {
        const std::vector<MemoryGroup>& groups = pool->sessions[s]->groups_;
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
      for (LoadSession* session : pool->sessions) session->groups_.clear();
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
      session->job_.options.engine->order_after_caller();
      session->memory_is_ready(groups);
    }
    return next;
  }

  // --- one thread of a pool ---

  class Worker final : public UnitWorker {
   public:
    Worker(Together& together, Pool& pool, std::stop_token stop)
        : together_(together), pool_(pool), stop_(std::move(stop)), of_(pool.sessions.size()) {}

    bool help() override {
      bool helped = false;
      each([&](LoadWorker& worker) { helped = worker.help() || helped; });
      return helped;
    }

    void prepare(size_t unit) override {
      const uint32_t load = unit_at(pool_, unit).load;
      guarded(load, [&] {
        if (prepared_ && *prepared_ != load) of_[*prepared_]->unprepare();
        prepared_ = load;
        worker(load).prepare();
      });
    }

    void process(size_t unit) override {
      const auto [load, number] = unit_at(pool_, unit);
      prepared_.reset();
      guarded(load, [&, which = load, at = number] { worker(which).process(at); });
    }

    void finish() override {
      each([](LoadWorker& worker) { worker.finish(); });
      // Others may have more to do than this thread has seen.
      for (uint32_t load = 0; load < of_.size(); ++load) {
        if (!of_[load] && pool_.sessions[load]->job_.digester)
          guarded(load, [&] { pool_.sessions[load]->job_.digester->finish(stop_); });
      }
    }

   private:
    LoadWorker& worker(uint32_t load) {
      if (!of_[load])
        of_[load] = make_load_worker(pool_.sessions[load]->job_, stop_,
                                     [this, load] { release_others(load); });
      return *of_[load];
    }

    // Whoever waits in line for a buffer of one device holds none of another's: that would keep
    // those waiting who hold what he waits for. His own copies end without anybody's help: while he
    // waits for those, the other device goes on with what it has.
    void release_others(uint32_t load) {
      for (uint32_t other = 0; other < of_.size(); ++other)
        if (other != load && of_[other]) guarded(other, [&] { of_[other]->release_buffers(); });
    }

    template <class Fn>
    void each(Fn&& fn) {
      for (uint32_t load = 0; load < of_.size(); ++load) {
        if (of_[load]) guarded(load, [&] { fn(*of_[load]); });
      }
    }

    // What is thrown is noted as that load's.
    template <class Fn>
    void guarded(uint32_t load, Fn&& fn) {
      try {
        fn();
      } catch (const Error& error) {
        if (error.code() != Errc::cancelled) together_.note_failure(*pool_.sessions[load]);
        throw;
      }
    }

    Together& together_;
    Pool& pool_;
    const std::stop_token stop_;
    std::vector<std::unique_ptr<LoadWorker>> of_;  // per load; made when it is first needed
    std::optional<uint32_t> prepared_;             // the load of the unit that is expected
  };

  void note_failure(LoadSession& session) {
    const MutexLock lock(mutex_);
    if (failure_) return;
    failed_ = &session;
    failure_ = std::current_exception();
  }

  // In the handler of the failure, with all workers gone: throws what says more, if there is such.
  void explain() {
    const MutexLock lock(mutex_);
    if (!failure_) return;
    try {
      std::rethrow_exception(failure_);
    } catch (const Error& error) {
      failed_->blame_source(error);
      throw;
    }
  }

  const std::span<LoadSession* const> sessions_;
  const unsigned at_once_;
  const OnCaller& on_caller_;
  const std::stop_token& stop_;
  std::vector<std::unique_ptr<Pool>> pools_;
  Mutex mutex_;
  LoadSession* failed_ GUARDED_BY(mutex_) = nullptr;
  std::exception_ptr failure_ GUARDED_BY(mutex_);  // the first of a worker
};

void load_together(std::span<LoadSession* const> sessions, unsigned at_once,
                   const OnCaller& on_caller, const std::stop_token& stop) {
  Together(sessions, at_once, on_caller, stop).run();
}

}  // namespace tensorizer::load
