#include "save/save_session.h"

#include <algorithm>
#include <array>

#include "core/checked_math.h"
#include "core/error.h"
#include "crypto/chunked_box.h"
#include "save/record_writer.h"

namespace tensorizer::save {

namespace {

constexpr uint64_t kEndMarkNbytes = 8;
constexpr uint64_t kBriefNbytes = uint64_t{1} << 20;  // hashed and written in a few milliseconds
constexpr size_t kBriefRecords = 64;
constexpr int kNonceDraws = 8;  // 64 random bits may repeat in a file of many records
constexpr size_t kHashedAtOnce = 32;

}  // namespace

struct SaveSession::Call {
  std::vector<TensorToWrite> tensors;
  std::vector<PlannedRecord> records;
  std::vector<format::OwnedPair> ties;  // stored names
  format::Prologue prologue;            // as it will be when the call is finished
  Head before;                          // what abort_call() goes back to
  size_t path_mark = 0;
  size_t entry_mark = 0;
  size_t tie_mark = 0;
  bool brief = false;
  bool may_wait = false;      // the content need not be published with this call
  bool has_head = false;      // prologue, index and annex are written
  uint64_t index_nbytes = 0;  // with the entries of this call
  uint64_t records_end = 0;
  size_t written = 0;  // records handed over so far
};

SaveSession::SaveSession(std::shared_ptr<io::RangeSink> sink, uint64_t start,
                         const SaveOptions& options)
    : sink_(std::move(sink)), start_(start), options_(options), metadata_(options.metadata) {
  if (options_.key) {
    tag_key_ = crypto::derive_subkey(*options_.key, crypto::KeyUse::tag);
    mark_key_ = crypto::derive_subkey(*options_.key, crypto::KeyUse::mark);
  }
  head_.prologue.version = options_.key ? format::kVersionEncrypted : format::kVersionPlain;
  head_.end = start;
}

SaveSession::~SaveSession() = default;

// A fresh random nonce whose chunk nonces cannot meet those of another record of this file: bytes 8
// to 15 differ, and the lower 8 are far from overflowing. Its end is the mark of an authenticated
// file.
format::Nonce SaveSession::draw_nonce() {
  for (int draw = 0; draw < kNonceDraws; ++draw) {
    format::Nonce nonce;
    crypto::random_bytes(nonce);
    nonce[7] &= std::byte{0x7F};
    std::array<std::byte, 8> middle;
    std::copy_n(nonce.begin() + 8, middle.size(), middle.begin());
    if (!nonces_.insert(middle).second) continue;
    crypto::mark_nonce(nonce, *mark_key_);
    return nonce;
  }
  throw Error(Errc::crypto, "the random generator repeats itself: refusing to reuse a nonce");
}

bool SaveSession::is_brief(std::span<const TensorToWrite> tensors, bool growing) const {
  if (tensors.size() > kBriefRecords) return false;
  uint64_t nbytes = 0;
  format::Prologue prologue = head_.prologue;
  for (const TensorToWrite& tensor : tensors) {
    if (tensor.data_nbytes > kBriefNbytes) return false;
    nbytes += tensor.data_nbytes;
    prologue = raise_version(prologue, tensor, options_.key != nullptr);
  }
  const bool tagged = prologue.tagged_entries();
  const bool fits =
      head_.room == 0 ||
      (tagged == head_.prologue.tagged_entries() &&
       index_nbytes_with(tensors, tagged) + annex_nbytes_with(tensors.size(), {}) <= head_.room);
  return nbytes <= kBriefNbytes && fits &&
         (sink_->in_memory() || (growing && sink_->may_wait(waiting_nbytes() + nbytes)));
}

bool SaveSession::call_is_brief() const noexcept { return call_ && call_->brief; }

void SaveSession::begin_call(std::vector<TensorToWrite> tensors,
                             std::span<const format::TensorPath> paths,
                             std::span<const TieToWrite> ties, bool growing,
                             const std::stop_token& stop) {
  if (!owner_.is_this_one())
    throw Error(Errc::invalid_argument,
                sink_->name() + " is written by the process that opened it: a forked child cannot",
                sink_->name());
  check_order();
  auto call = std::make_unique<Call>();
  call->path_mark = paths_.mark();
  call->entry_mark = entries_.size();
  call->tie_mark = ties_.size();
  call->before = head_;
  call->brief = is_brief(tensors, growing);
  try {
    for (const format::TensorPath& path : paths) paths_.add(path);
    for (const TieToWrite& tie : ties) {
      if (!tie.listed) paths_.add(tie.alias);
      call->ties.emplace_back(format::encode_name(tie.alias), format::encode_name(tie.target));
    }
    call->prologue = head_.prologue;
    for (const TensorToWrite& tensor : tensors) {
      call->prologue = raise_version(call->prologue, tensor, options_.key != nullptr);
      call->prologue.tensor_size += tensor.data_nbytes;
    }
    call->prologue.tensor_count += tensors.size();
    call->tensors = std::move(tensors);
    make_room(*call, growing, stop);
    place_records(*call);
    call->may_wait = growing && published_end_ > 0 && !moved_by_ &&
                     (sink_->may_wait(call->records_end - published_end_) ||
                      (published_annex_ && sink_->relocates_to_new_file()));
    sink_->reserve_head(start_ + format::kPrologueNbytes + head_.room);
    sink_->reserve(call->records_end + kEndMarkNbytes);
    if (sink_->in_order()) {
      take_entries(*call);
      write_head(Publish::create, stop);
      call->has_head = true;
    }
  } catch (...) {
    undo(*call);
    throw;
  }
  call_ = std::move(call);
}

// Where bytes go from front to back, the head has to be known before the records.
void SaveSession::check_order() const {
  if (!sink_->in_order()) return;
  const char* problem = nullptr;
  if (published_end_ > 0) {
    problem = "a second call would change its beginning";
  } else if (options_.key) {
    problem = "encrypted tensors have their MACs in front of them";
  } else if (options_.signer) {
    problem = "a signature is in front of what it signs";
  } else if (options_.hashes.crc32 || options_.hashes.sha256) {
    problem = "hashes are in front of the tensors that they are of";
  }
  if (problem != nullptr) io::throw_out_of_order(sink_->name(), problem);
}

// Bytes of the index with `tensors` added; all of it anew where the form of entries changes.
uint64_t SaveSession::index_nbytes_with(std::span<const TensorToWrite> tensors, bool tagged) const {
  uint64_t nbytes = head_.index_nbytes;
  if (tagged != head_.prologue.tagged_entries()) {
    nbytes = 0;
    for (const SavedEntry& entry : entries_)
      nbytes += format::index_entry_nbytes(entry.view(), tagged);
  }
  for (const TensorToWrite& tensor : tensors) {
    nbytes += format::index_entry_nbytes(
        {tensor.name, tensor.dtype, tensor.shape, tensor.type, 0, 0, 0}, tagged);
  }
  return nbytes;
}

void SaveSession::make_room(Call& call, bool growing, const std::stop_token& stop) {
  const bool tagged = call.prologue.tagged_entries();
  call.index_nbytes = index_nbytes_with(call.tensors, tagged);
  const uint64_t needed = call.index_nbytes + annex_nbytes_with(call.tensors.size(), call.ties);
  if (head_.room == 0) {
    head_.room = index_room(needed, growing);
    head_.end = start_ + format::kPrologueNbytes + head_.room;
    return;
  }
  // An index whose entries change their form is not written over the published one.
  const bool anew = tagged != head_.prologue.tagged_entries() && sink_->relocates_to_new_file();
  if (anew || needed > head_.room)
    relayout(call, std::max(head_.room, index_room(needed, true)), stop);
}

// All records move behind a larger index. Where they move in place, the content is published again
// before anything new is written.
void SaveSession::relayout(Call& call, uint64_t room, const std::stop_token& stop) {
  move_content(room - head_.room, stop);
  if (moved_by_) return;
  unfinished_ = Publish::in_place;  // the head describes what is no longer there
  call.before = head_;
  publish(stop);
  call.before = head_;
}

// Where the sink copies the records into a new file, the published one stays as it is until the
// next publish().
void SaveSession::move_content(uint64_t distance, const std::stop_token& stop) {
  const uint64_t begin = start_ + format::kPrologueNbytes + head_.room;
  sink_->relocate(begin, head_.end - begin, begin + distance, stop);
  if (sink_->relocates_to_new_file()) moved_by_ = distance;
  move_records(distance);
}

// By a distance modulo 2^64, so that adding the negated one undoes it.
void SaveSession::move_records(uint64_t distance) noexcept {
  for (SavedEntry& entry : entries_) {
    entry.offset += distance;
    entry.data_offset += distance;
  }
  head_.end += distance;
  head_.room += distance;
  if (distance != 0) head_.indexed = false;
}

void SaveSession::place_records(Call& call) {
  const PlanChoice choice{options_.hashes, options_.key != nullptr, options_.derivation};
  uint64_t offset = head_.end;
  call.records.reserve(call.tensors.size());
  for (const TensorToWrite& tensor : call.tensors) {
    const bool encrypted = options_.key != nullptr && tensor.data_nbytes > 0;
    call.records.push_back(
        plan_record(tensor, offset, choice, encrypted ? draw_nonce() : format::Nonce{}));
    const std::optional<uint64_t> next =
        checked_add(call.records.back().data_offset(), tensor.data_nbytes);
    if (!next || *next > (uint64_t{1} << 62))
      throw Error(Errc::invalid_argument, "the tensors are larger than a file can be");
    offset = *next;
  }
  call.records_end = offset;
}

void SaveSession::write_payloads(std::span<const device::TensorMemory> payloads,
                                 device::CopyEngine* engine, const std::stop_token& stop) {
  if (!call_) throw Error(Errc::invalid_argument, "no write call is open");
  const std::span<PlannedRecord> left = std::span(call_->records).subspan(call_->written);
  if (payloads.size() > left.size())
    throw Error(Errc::invalid_argument, "the call has planned fewer payloads");
  const std::span<PlannedRecord> records = left.first(payloads.size());
  for (size_t i = 0; i < payloads.size(); ++i) {
    if (payloads[i].nbytes != records[i].data_nbytes)
      throw Error(Errc::invalid_argument, "payload " + std::to_string(call_->written + i) +
                                              " of the call: expected " +
                                              std::to_string(records[i].data_nbytes) +
                                              " bytes, got " + std::to_string(payloads[i].nbytes));
  }
  call_->written += payloads.size();
  write_records({.records = records,
                 .payloads = payloads,
                 .engine = engine,
                 .hashes = options_.hashes,
                 .key = options_.key.get(),
                 .max_workers = options_.max_workers,
                 .nbytes_done = nbytes_done_},
                *sink_, stop);
}

std::vector<RecordFacts> SaveSession::records() const {
  if (!call_ || call_->written != call_->records.size())
    throw Error(Errc::invalid_argument, "not all payloads of the call were written");
  std::vector<RecordFacts> result;
  result.reserve(call_->records.size());
  for (const PlannedRecord& record : call_->records) {
    const format::HeaderLayout& header = record.header;
    RecordFacts facts{.data_offset = record.data_offset(), .crc32 = {}, .sha256 = {}};
    if (header.crc32_at != 0)
      facts.crc32 = load_le<uint32_t>(header.bytes.data() + header.crc32_at);
    if (header.sha256_at != 0) {
      facts.sha256.emplace();
      std::memcpy(facts.sha256->data(), header.bytes.data() + header.sha256_at,
                  facts.sha256->size());
    }
    result.push_back(facts);
  }
  return result;
}

void SaveSession::finish_call(const std::stop_token& stop) {
  if (!call_ || call_->written != call_->records.size())
    throw Error(Errc::invalid_argument, "not all payloads of the call were written");
  if (!call_->has_head) take_entries(*call_);
  if (!call_->may_wait) publish(stop);
  call_.reset();
}

void SaveSession::take_entries(Call& call) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    TensorToWrite& tensor = call.tensors[i];
    tensor.dtype = index_dtype(tensor);
    entries_.push_back(
        {std::move(tensor), call.records[i].offset, call.records[i].data_offset(), {}});
  }
  if (options_.digests_headers()) digest_headers(call);
  ties_.insert(ties_.end(), call.ties.begin(), call.ties.end());
  if (call.prologue.tagged_entries() != head_.prologue.tagged_entries()) head_.indexed = false;
  head_.prologue = call.prologue;
  head_.index_nbytes = call.index_nbytes;
  head_.end = call.records_end;
}

// Of the records whose entries came last. Their headers are complete.
void SaveSession::digest_headers(const Call& call) {
  SavedEntry* entry = entries_.data() + call.entry_mark;
  std::vector<digest::Sha256> streams;
  std::vector<digest::Sha256::Update> updates;
  for (size_t begin = 0; begin < call.records.size(); begin += kHashedAtOnce) {
    const size_t n = std::min(kHashedAtOnce, call.records.size() - begin);
    streams.assign(n, {});
    updates.clear();
    for (size_t i = 0; i < n; ++i)
      updates.push_back({&streams[i], call.records[begin + i].header.bytes});
    digest::Sha256::update_all(updates);
    for (digest::Sha256& stream : streams) (entry++)->header_digest = stream.finish();
  }
}

// An annex lies where further entries would go, and has a digest of all of them.
SaveSession::Publish SaveSession::how_to_publish() const noexcept {
  if (published_end_ == 0) return Publish::create;
  if (moved_by_) return Publish::replace;
  if (head_.indexed && unfinished_ != Publish::in_place && !published_annex_ && !has_annex())
    return Publish::append;
  return sink_->relocates_to_new_file() ? Publish::replace : Publish::in_place;
}

void SaveSession::publish(const std::stop_token& stop) {
  Publish how = how_to_publish();
  if (how == Publish::replace && !moved_by_ && !copies_to_new_file(stop)) how = Publish::in_place;
  const std::array<std::byte, kEndMarkNbytes> end_mark{};
  sink_->write_at(head_.end, io::ConstBuffer(end_mark), stop);
  if (how == Publish::append) {
    write_new_entries(stop);
  } else if (!sink_->in_order()) {
    write_head(how, stop);
  }
  sink_->publish(head_.end + kEndMarkNbytes, stop);
  published_end_ = head_.end;
  published_prologue_ = stored_prologue();
  published_annex_ = has_annex();
  unfinished_.reset();
  moved_by_.reset();
}

// A copy of all records beside them. False where a full disk has no room for it: what earlier calls
// have written is then shown by writing over the head that is there, though a power cut in the
// middle of that would damage it.
bool SaveSession::copies_to_new_file(const std::stop_token& stop) {
  try {
    move_content(0, stop);
    return true;
  } catch (const Error& error) {
    if (!is_full(error.system_errno)) throw;
    return false;
  }
}

// What calls before this one left to be published.
void SaveSession::publish_waiting(const std::stop_token& stop) {
  if (published_end_ == 0 || waiting_nbytes() == 0) return;
  const Head before = head_;
  try {
    publish(stop);
  } catch (...) {
    take_back(before);
    throw;
  }
}

// The entries that are not in the file yet, and then, once they and all records are where no crash
// can take them away, the prologue that counts them.
void SaveSession::write_new_entries(const std::stop_token& stop) {
  std::vector<std::byte> bytes;
  for (size_t i = head_.written; i < entries_.size(); ++i) {
    format::append_index_entry(bytes, entries_[i].view(), head_.prologue.tagged_entries());
  }
  sink_->write_at(start_ + format::kPrologueNbytes + head_.written_nbytes, io::ConstBuffer(bytes),
                  stop);
  sink_->barrier(stop);
  unfinished_ = Publish::append;
  sink_->write_at(start_, io::ConstBuffer(stored_prologue()), stop);
  head_.written = entries_.size();
  head_.written_nbytes += bytes.size();
}

// All of it, with zeros to the end of the index's room.
void SaveSession::write_head(Publish how, const std::stop_token& stop) {
  std::vector<std::byte> index;
  for (const SavedEntry& entry : entries_)
    format::append_index_entry(index, entry.view(), head_.prologue.tagged_entries());
  const uint64_t nbytes = index.size();
  const auto prologue = stored_prologue();
  if (has_annex()) {
    std::vector<digest::Sha256Digest> records;
    if (options_.digests_headers()) {
      records.reserve(entries_.size());
      for (const SavedEntry& entry : entries_) records.push_back(entry.header_digest);
    }
    format::AnnexToWrite content = annex_with({});
    content.records = records;
    const std::vector<std::byte> annex = format::serialize_annex(
        content, seal_metadata(), format::digest_index(prologue, index),
        [this](const digest::Sha256Digest& digest) { return sign(digest); });
    index.insert(index.end(), annex.begin(), annex.end());
  }
  index.resize(head_.room);
  sink_->barrier(stop);
  unfinished_ = how;
  if (how == Publish::create && !sink_->in_order()) {
    sink_->write_at(start_ + prologue.size(), io::ConstBuffer(index), stop);
    sink_->write_at(start_, io::ConstBuffer(prologue), stop);
  } else {
    const std::array<io::ConstBuffer, 2> both{io::ConstBuffer(prologue), io::ConstBuffer(index)};
    sink_->write_at(start_, both, stop);
  }
  head_.indexed = true;
  head_.written = entries_.size();
  head_.written_nbytes = nbytes;
}

format::AnnexToWrite SaveSession::annex_with(std::span<const format::OwnedPair> more_ties) const {
  format::AnnexToWrite annex;
  for (const auto& [key, value] : metadata_) annex.metadata.push_back({key, value});
  for (const auto& [alias, target] : ties_) annex.ties.push_back({alias, target});
  for (const auto& [alias, target] : more_ties) annex.ties.push_back({alias, target});
  return annex;
}

bool SaveSession::has_annex() const noexcept {
  return options_.digests_headers() || !metadata_.empty() || !ties_.empty();
}

format::Signatures SaveSession::sign(const digest::Sha256Digest& digest) {
  format::Signatures signatures;
  if (options_.digests_headers()) digest_ = digest;
  if (tag_key_)
    signatures.tag = {.derivation = options_.derivation,
                      .tag = crypto::make_tag(digest, *tag_key_)};
  if (const auto& signer = options_.signer)
    signatures.signatures.push_back(
        {signer->public_key(), signer->sign(crypto::signed_message(digest))});
  return signatures;
}

uint64_t SaveSession::annex_nbytes_with(size_t more_entries,
                                        std::span<const format::OwnedPair> more_ties) const {
  if (!has_annex() && more_ties.empty()) return 0;
  const uint64_t sealed_overhead =
      options_.key ? format::kSectionPrefixNbytes +
                         format::message_crypt_info_nbytes(options_.derivation.has_value())
                   : 0;
  return format::annex_nbytes(annex_with(more_ties), sealed_overhead,
                              entries_.size() + more_entries,
                              {.records = options_.binds_records,
                               .tag = options_.key != nullptr,
                               .derivation = options_.derivation.has_value(),
                               .signatures = options_.signer ? 1U : 0U});
}

// One message under a nonce of its own, drawn like those of records.
std::vector<std::byte> SaveSession::seal_metadata() {
  if (!options_.key || metadata_.empty()) return {};
  const std::vector<std::byte> plain = format::serialize_metadata(annex_with({}).metadata);
  std::vector<std::byte> cipher(plain.size());
  std::array<std::byte, kMacNbytes> mac;
  const format::Nonce nonce = draw_nonce();
  crypto::seal(cipher, mac, plain, crypto::NonceView(nonce), *options_.key);
  std::vector<std::byte> sealed =
      format::serialize_message_crypt_info(options_.derivation, nonce, mac);
  sealed.insert(sealed.end(), cipher.begin(), cipher.end());
  return sealed;
}

void SaveSession::set_metadata(const std::string& key, const std::string& value) {
  std::erase_if(metadata_, [&](const format::OwnedPair& pair) { return pair.first == key; });
  if (!value.empty()) metadata_.emplace_back(key, value);
}

std::array<std::byte, format::kPrologueNbytes> SaveSession::stored_prologue() const {
  format::Prologue stored = head_.prologue;
  stored.metadata_nbytes = head_.room;
  stored.tensor_count = entries_.size();
  return format::serialize_prologue(stored);
}

// After a failed publish() the file shows what was published last again.
void SaveSession::take_back(const Head& before) noexcept {
  if (moved_by_) {
    sink_->undo_relocate();
    move_records(-*moved_by_);
    moved_by_.reset();
    unfinished_.reset();
  }
  head_ = before;
  if (unfinished_) restore_head();
}

// The prologue, or all of the head, in the file may count records that are void. Puts back those of
// the last published content; where that fails too, the next publish() writes all of it.
void SaveSession::restore_head() noexcept {
  try {
    if (unfinished_ == Publish::in_place) {
      write_head(Publish::in_place, {});
    } else {
      sink_->write_at(start_, io::ConstBuffer(published_prologue_), {});
    }
    unfinished_.reset();
  } catch (...) {  // what failed first tells more
    unfinished_ = Publish::in_place;
  }
}

void SaveSession::abort_call() noexcept {
  if (call_ && owner_.is_this_one()) undo(*call_);
  call_.reset();
}

void SaveSession::undo(Call& call) noexcept {
  paths_.rollback(call.path_mark);
  entries_.resize(call.entry_mark);
  ties_.resize(call.tie_mark);
  if (published_end_ == 0) {
    head_ = call.before;
    unfinished_.reset();
    sink_->rollback(0);
    return;
  }
  take_back(call.before);
  sink_->rollback(head_.end + kEndMarkNbytes);
}

uint64_t SaveSession::published_nbytes() const noexcept {
  return published_end_ == 0 ? 0 : published_end_ + kEndMarkNbytes - start_;
}

void SaveSession::finish(const std::stop_token& stop) {
  if (!owner_.is_this_one()) return abandon();
  try {
    publish_waiting(stop);
    sink_->finish(stop);
  } catch (...) {
    sink_->abandon();
    throw;
  }
}

void SaveSession::abandon() noexcept {
  try {
    abort_call();
    if (owner_.is_this_one()) publish_waiting({});
  } catch (...) {  // the content that was published before stays
  }
  sink_->abandon();
}

}  // namespace tensorizer::save
