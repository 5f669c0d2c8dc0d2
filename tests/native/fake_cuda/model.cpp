#include "model.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace fake_cuda {
namespace {

constexpr uint64_t kAccessPage = 64 << 10;

unsigned long env_number(const char* name, unsigned long fallback) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoul(text, nullptr, 10) : fallback;
}

bool ordered_before(const Access& access, const Clock& clock) {
  return access.number <= clock.of(access.stream);
}

}  // namespace

void violation(const std::string& what) {
  std::fprintf(stderr, "fake CUDA driver: rule broken: %s\n", what.c_str());
  std::fflush(stderr);
  std::abort();
}

Model& model() {
  static Model* const instance = new Model;
  return *instance;
}

Model::Model() {
  started_by = ::getpid();
  version = static_cast<int>(env_number("FAKE_CUDA_VERSION", 13000));
  devices = static_cast<int>(env_number("FAKE_CUDA_DEVICES", 2));
  can_register = env_number("FAKE_CUDA_NO_REGISTER", 0) == 0;
  any_address = env_number("FAKE_CUDA_ANY_ADDRESS", 0) != 0;
  random.seed(static_cast<unsigned>(env_number("FAKE_CUDA_SEED", 1)));
  if (const char* delay = std::getenv("FAKE_CUDA_DELAY_US"))
    std::sscanf(delay, "%u:%u", &min_delay_us, &max_delay_us);
  if (const char* faults_wanted = std::getenv("FAKE_CUDA_FAIL")) parse_faults(faults_wanted);
  link = std::make_unique<LinkModel>(devices);
  for (int device = 0; device < devices; ++device) {
    contexts.push_back(std::make_unique<ContextTag>(ContextTag{device}));
    default_streams.push_back(make_stream(device, true));
  }
}

std::shared_ptr<StreamTag> Model::make_stream(int device, bool of_caller) {
  auto stream = std::make_shared<StreamTag>();
  stream->number = next_stream++;
  stream->device = device;
  stream->of_caller = of_caller;
  streams[stream.get()] = stream;
  stream->worker = std::thread([this, stream] { run_stream(*stream); });
  return stream;
}

void Model::run_stream(StreamTag& stream) {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] {
      if (stream.queue.empty()) return stream.closing;
      const Operation& next = stream.queue.front();
      return lost != 0 || !next.may_run || next.may_run();
    });
    if (stream.queue.empty()) return;
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    const unsigned delay =
        std::uniform_int_distribution<unsigned>(min_delay_us, max_delay_us)(random);
    const bool runs = lost == 0 && operation.run;
    stream.running = runs;
    lock.unlock();
    if (runs && delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    const auto over = runs && link->is_on() ? link->book(stream.device, operation.cost)
                                            : LinkModel::Clock::time_point();
    if (runs) operation.run();
    if (runs && link->is_on()) std::this_thread::sleep_until(over);
    operation = {};
    lock.lock();
    stream.running = false;
    ++stream.completed;
    changed.notify_all();
  }
}

void Model::close_stream(std::unique_lock<std::mutex>& lock,
                         const std::shared_ptr<StreamTag>& stream) {
  const bool works = stream->running || std::any_of(stream->queue.begin(), stream->queue.end(),
                                                    [](const Operation& o) { return !!o.run; });
  if (!stream->of_caller && works && lost == 0)
    violation("a stream was destroyed while it still had work");
  stream->closing = true;
  streams.erase(stream.get());
  changed.notify_all();
  lock.unlock();
  stream->worker.join();
  lock.lock();
  if (lost != 0) host.merge(stream->clock);  // a lost device does nothing any more
}

uint64_t Model::enqueue(const std::shared_ptr<StreamTag>& stream, Operation operation) {
  stream->clock.merge(host);
  const uint64_t number = ++stream->enqueued;
  stream->clock.advance(stream->number, number);
  stream->queue.push_back(std::move(operation));
  changed.notify_all();
  return number;
}

void Model::record(EventTag& event, const std::shared_ptr<StreamTag>& stream) {
  stream->clock.merge(host);
  event.record = std::make_shared<Record>(Record{stream, stream->enqueued, stream->clock});
}

void Model::wait_for_record(std::unique_lock<std::mutex>& lock,
                            const std::shared_ptr<Record>& record) {
  changed.wait(lock, [&] { return lost != 0 || record->stream->completed >= record->number; });
  if (lost == 0) host.merge(record->clock);
}

Block* Model::find(std::map<std::byte*, std::unique_ptr<Block>>& blocks, const void* address,
                   uint64_t nbytes) {
  auto* at = const_cast<std::byte*>(static_cast<const std::byte*>(address));
  auto found = blocks.upper_bound(at);
  if (found == blocks.begin()) return nullptr;
  Block& block = *std::prev(found)->second;
  const auto offset = static_cast<uint64_t>(at - block.address);
  return offset <= block.nbytes && nbytes <= block.nbytes - offset ? &block : nullptr;
}

void Model::note_access(Block& block, const void* address, uint64_t nbytes, StreamTag& stream,
                        bool writes) {
  if (nbytes == 0) return;
  const auto begin = static_cast<uint64_t>(static_cast<const std::byte*>(address) - block.address);
  const Access access{begin, begin + nbytes, stream.number, stream.enqueued + 1, writes};
  stream.clock.merge(host);
  for (uint64_t page = begin / kAccessPage; page <= (access.end - 1) / kAccessPage; ++page) {
    std::vector<Access>& recent = block.recent[page];
    std::erase_if(recent, [&](const Access& a) { return ordered_before(a, host); });
    for (const Access& other : recent) {
      const bool apart = other.end <= access.begin || access.end <= other.begin;
      if (apart || (!other.writes && !writes) || ordered_before(other, stream.clock)) continue;
      if (other.stream == access.stream && other.number == access.number) {
        if (other.writes && writes) violation("one call writes the same bytes twice");
        continue;
      }
      violation(std::string("two streams touch the same ") +
                (block.device < 0 ? "host" : "device") +
                " memory, one of them writing, and nothing orders them");
    }
    recent.push_back(access);
  }
}

bool Model::is_at_rest(const Block& block, const void* address, uint64_t nbytes) const {
  const auto begin = static_cast<uint64_t>(static_cast<const std::byte*>(address) - block.address);
  for (const auto& [page, recent] : block.recent)
    for (const Access& a : recent)
      if (a.begin < begin + nbytes && begin < a.end && !ordered_before(a, host)) return false;
  return true;
}

void Model::require_rest(const Block& block, const Clock& clock, const char* what) const {
  for (const auto& [page, recent] : block.recent)
    for (const Access& access : recent)
      if (!ordered_before(access, clock) && !ordered_before(access, host)) violation(what);
}

int Model::fault(const std::string& name) {
  ++calls[name];
  if (lost != 0) return lost;
  for (Fault& fault : faults) {
    if (fault.name != name || fault.countdown == 0 || --fault.countdown > 0) continue;
    if (fault.sticky) {
      lost = fault.code;
      changed.notify_all();
    }
    return fault.code;
  }
  return 0;
}

void Model::parse_faults(const std::string& specification) {
  std::stringstream list(specification);
  for (std::string item; std::getline(list, item, ',');) {
    std::stringstream fields(item);
    std::string name;
    std::string nth;
    std::string code;
    std::string sticky;
    std::getline(fields, name, ':');
    std::getline(fields, nth, ':');
    std::getline(fields, code, ':');
    std::getline(fields, sticky, ':');
    faults.push_back({name, static_cast<unsigned>(std::strtoul(nth.c_str(), nullptr, 10)),
                      std::atoi(code.c_str()), sticky == "sticky" || name == "execute"});
  }
}

}  // namespace fake_cuda
