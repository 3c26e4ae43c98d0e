#include "worker/replicas/ahead.h"

#include "oplog/compound.h"
#include "oplog/geometry.h"

namespace sing {

namespace {

constexpr int kDepthMax = 4;

}  // namespace

Ahead::Found Ahead::look(const RecordHeader& header, std::span<const std::byte> payload) {
  Reader in(payload);
  switch (static_cast<RecordKind>(header.kind)) {
    case RecordKind::storages:
      return storages(in);
    case RecordKind::write:
      return write(in);
    case RecordKind::read:
    case RecordKind::resize:
      return in.get<uint32_t>() == id_ || !in.ok() ? Found::used : Found::nothing;
    case RecordKind::call:
      // The results of a request may have other sizes than its operands.
      return call(in, (header.flags & kRequest) == 0);
    case RecordKind::define:  // another operator, unless the number is new
      return operators_.find(in.get<uint32_t>()) || !in.ok() ? Found::used : Found::nothing;
    case RecordKind::synchronize:
    case RecordKind::generator:
    case RecordKind::event:
    case RecordKind::settings:
    case RecordKind::answered:
      return Found::nothing;
  }
  return Found::used;
}

Ahead::Found Ahead::storages(Reader& in) const {
  const uint32_t count = in.get_count(0);
  in.get<uint32_t>();
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    if (in.get<StorageEntry>().id == id_ && in.ok()) return Found::overwritten;
  }
  return in.ok() ? Found::nothing : Found::used;
}

Ahead::Found Ahead::write(Reader& in) {
  const auto id = in.get<uint32_t>();
  in.get<uint32_t>();
  const auto offset = in.get<uint64_t>();
  const auto count = in.get<uint64_t>();
  if (!in.ok()) return Found::used;
  return id == id_ ? overwrite(offset, count) : Found::nothing;
}

Ahead::Found Ahead::overwrite(uint64_t offset, uint64_t count) {
  if (count > UINT64_MAX - offset) return Found::used;
  left_.remove(offset, count);
  return left_.empty() ? Found::overwritten : Found::nothing;
}

Ahead::Found Ahead::call(Reader& in, bool predicted) {
  const std::optional<Uses> uses = uses_of(in);
  if (!uses) return Found::used;
  if (uses->count == 0) return Found::nothing;
  if (!predicted || uses->count != 1 || !uses->whole_range) return Found::used;
  return overwrite(uses->offset, uses->bytes);
}

bool Ahead::changes(const RecordHeader& header, std::span<const std::byte> payload) const {
  if (header.kind != static_cast<uint8_t>(RecordKind::call)) return true;
  Reader in(payload);
  const std::optional<Uses> uses = uses_of(in);
  return !uses || uses->changed;
}

std::optional<Ahead::Uses> Ahead::uses_of(Reader& in) const {
  const auto number = in.get<uint32_t>();
  const auto arguments = in.get<uint16_t>();
  in.get<uint16_t>();
  const Operator* op = in.ok() ? operators_.find(number) : nullptr;
  if (op == nullptr || !op->handle || arguments != op->arguments.size()) return std::nullopt;
  Uses uses;
  for (uint16_t i = 0; i < arguments && in.ok(); ++i) {
    value(in, op->arguments[i], op->zeroes && i == 0, 0, uses);
  }
  return in.ok() ? std::optional(uses) : std::nullopt;
}

// `zeroed`: it is overwritten with zeros.
void Ahead::tensor(Reader& in, const ArgumentType& type, bool zeroed, Uses& uses) const {
  const auto id = in.get<uint32_t>();
  const Geometry geometry = get_geometry(in);
  if (!in.ok() || id != id_) return;
  ++uses.count;
  const uint64_t end = geometry.storage_bytes();
  uses.offset = static_cast<uint64_t>(geometry.offset) * c10::elementSize(geometry.dtype);
  uses.changed |= type.changed;
  uses.whole_range = (type.out || zeroed) && geometry.is_contiguous() && end > uses.offset;
  uses.bytes = end - uses.offset;
}

void Ahead::value(Reader& in, const ArgumentType& type, bool zeroed, int depth, Uses& uses) const {
  switch (in.get<Tag>()) {
    case Tag::none:
    case Tag::undefined:
      return;
    case Tag::tensor:
      return tensor(in, type, zeroed, uses);
    case Tag::compound: {
      const Compound compound = get_compound(in);
      for (size_t i = 0; i < compound.parts() && in.ok(); ++i) {
        if (in.get<Tag>() != Tag::tensor) return in.fail();
        tensor(in, type, zeroed, uses);
      }
      uses.whole_range = false;  // parts are read before they are overwritten
      return;
    }
    case Tag::host_tensor:
      get_geometry(in);
      in.get_bytes(in.get<uint32_t>());
      return;
    case Tag::integer:
    case Tag::real:
      in.get<uint64_t>();
      return;
    case Tag::boolean:
    case Tag::device:
      in.get<uint8_t>();
      return;
    case Tag::complex:
      in.get_bytes(2 * sizeof(double));
      return;
    case Tag::string:
      in.get_string();
      return;
    case Tag::integers:
    case Tag::reals:
      in.get_bytes(size_t{in.get_count(sizeof(uint64_t))} * sizeof(uint64_t));
      return;
    case Tag::booleans:
      in.get_bytes(in.get_count(1));
      return;
    case Tag::list: {
      const uint32_t count = in.get_count(1);
      if (depth >= kDepthMax) return in.fail();
      for (uint32_t i = 0; i < count && in.ok(); ++i) value(in, type, zeroed, depth + 1, uses);
      return;
    }
    case Tag::generator:
      in.get<uint32_t>();
      return;
    case Tag::alias:
      break;
  }
  in.fail();
}

}  // namespace sing
