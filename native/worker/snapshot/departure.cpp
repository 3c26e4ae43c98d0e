// What a session takes along to another process of its job: see Note [Moves] in moved.h.
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

#include "oplog/mapping.h"
#include "worker/snapshot/snapshot.h"

namespace sing {

File carried_file() {
  File file(memfd_create("sing-carried", MFD_CLOEXEC));
  if (file.fd() < 0) throw_errno("cannot take state along");
  return file;
}

Departed Snapshots::depart(const uint64_t& position, const KnownContents& known) {
  if (!state_.device.is_cpu()) throw std::runtime_error("ranks of a GPU share no process");
  loads_.await_arrivals();  // nothing may refer to bytes that may never arrive
  Departed departed;
  departed.carried = preallocated_ ? std::move(*preallocated_) : carried_file();
  forget_preallocated();
  Arena carried(departed.carried.fd());
  Transfers copies(Transfers::Direction::save, carried, state_.device, state_.limits.piece_bytes);
  Snapshot snapshot;
  Gather small;  // only devices have something open
  ContentList contents(known);
  std::vector<TransferPtr> order;
  FreeRanges free({});
  orders_.while_parked([&] {
    if (orders_.ended()) throw std::runtime_error("the worker ends");
    state_.storages.settle();
    snapshot.header.position = position;
    snapshot.header.device_kind = static_cast<uint32_t>(kind_of(state_.device));
    Writer tables;
    put_tables(tables, state_, small, [&](uint32_t id, Slot& slot) {
      snapshot.header.state_bytes += saved_bytes(slot);
      const bool omitted = contents.omit(id, slot);
      Extent extent = slot.saved;
      if (!extent) {
        extent = {free.take(slot.filled), slot.filled, ++version_};
        // What others have is compared there with the bytes if that is to be checked.
        if (!omitted || state_.limits.check_splicing) {
          order.push_back(copies.add(slot.storage, extent));
          departed.copied += extent.count;
        }
      }
      snapshot.extents.push_back({extent.offset, extent.count, id, !slot.saved, extent.version});
    });
    for (uint32_t id = 0; id < state_.storages.all().size(); ++id) {
      Slot& slot = state_.storages.all()[id];
      if (saved_bytes(slot) < kInlineBytes) contents.add(id, slot);
    }
    snapshot.tables.assign(tables.view().begin(), tables.view().end());
    // Also gives back what was taken for more.
    if (ftruncate(departed.carried.fd(), static_cast<off_t>(free.end())) != 0) {
      throw_errno("cannot take state along");
    }
    if (order.empty()) return;
    carried.open_view(threads());
    copies.schedule(std::move(order));
    copies.help(threads(), Transfers::Pace::full);
    copies.finish();
  });
  complete(snapshot);
  departed.omitted = contents.omitted();
  departed.tables = File(write_snapshot(snapshot));
  departed.contents = File(contents.write());
  return departed;
}

}  // namespace sing
