#include "core/step/relay.h"

#include <algorithm>
#include <cstring>

#include "core/step/simd.h"
#include "core/step/wire.h"

namespace shoal::step {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

// Numbers ids in order of first occurrence; an open-addressed set of numbers into the ids it is given.
class Numbering {
 public:
  explicit Numbering(int64_t ids_max) {
    uint64_t capacity = 16;
    while (capacity < 2 * static_cast<uint64_t>(ids_max)) capacity <<= 1;
    mask_ = capacity - 1;
    entries().grow(capacity);
    std::memset(entries().data(), 0, capacity * sizeof(uint32_t));
  }
  // The number of `id`, which is appended to `ids` when it is new.
  uint32_t number_of(uint64_t id, uint64_t* ids, int64_t* count) {
    uint64_t place = fmix64(id) & mask_;
    for (;;) {
      uint32_t& entry = entries()[place];
      if (entry == 0) {
        ids[*count] = id;
        entry = static_cast<uint32_t>(++*count);
        return entry - 1;
      }
      if (ids[entry - 1] == id) return entry - 1;
      place = (place + 1) & mask_;
    }
  }

 private:
  static Buffer<uint32_t>& entries() {
    static thread_local Buffer<uint32_t> buffer;
    return buffer;
  }
  uint64_t mask_;
};

uint64_t id_at(const Table& table, const std::byte* data, int64_t i) {
  if (table.is_wide) {
    uint64_t id;
    std::memcpy(&id, data + 8 * i, sizeof id);
    return id;
  }
  int32_t id;
  std::memcpy(&id, data + 4 * i, sizeof id);
  return static_cast<uint64_t>(static_cast<int64_t>(id));
}

}  // namespace

Relay::Relay(StepPlan* plan, std::vector<int> owners, std::vector<int> locals)
    : plan_(plan),
      owners_(std::move(owners)),
      locals_(std::move(locals)),
      carried_(owners_.size()),
      sections_(owners_.size() * locals_.size()),
      section_bytes_(owners_.size() * locals_.size()),
      row_bytes_(plan->world_size),
      grad_bytes_(plan->world_size),
      local_row_bytes_(locals_.size()),
      local_grad_bytes_(locals_.size()) {
  for (size_t o = 0; o < owners_.size(); ++o) {
    if (owners_[o] < 0 || owners_[o] >= plan->world_size) throw std::invalid_argument("no such rank to carry for");
    carried_[o].owner = owners_[o];
  }
}

void Relay::merge(const int64_t* sources, const int64_t* source_bytes) {
  read_requests(sources, source_bytes);
  plan_->threads->run(static_cast<int64_t>(owners_.size()),
                      [&](int64_t o, int) { merge_owner(static_cast<size_t>(o)); });
  lay_out();
}

void Relay::read_requests(const int64_t* sources, const int64_t* source_bytes) {
  const size_t num_owners = owners_.size(), L = locals_.size();
  const int64_t index_bytes = aligned(8 * static_cast<int64_t>(num_owners));
  for (size_t l = 0; l < L; ++l) {
    const std::byte* message = reinterpret_cast<const std::byte*>(sources[l]);
    const int64_t bytes = source_bytes[l];
    int64_t at = index_bytes;
    if (bytes != 0 && bytes < index_bytes)
      throw ProtocolViolation("the request from rank " + std::to_string(locals_[l]) + " is cut short");
    for (size_t o = 0; o < num_owners; ++o) {
      int64_t section = 0;
      if (bytes) std::memcpy(&section, message + 8 * o, sizeof section);
      if (section < 0 || (bytes && section > bytes - at))
        throw ProtocolViolation("the request from rank " + std::to_string(locals_[l]) + " claims " +
                                std::to_string(section) + " bytes for rank " + std::to_string(owners_[o]) +
                                " beyond its " + std::to_string(bytes));
      sections_[o * L + l] = message + at;
      section_bytes_[o * L + l] = section;
      at += aligned(section);
    }
    if (bytes && at != bytes)
      throw ProtocolViolation("the request from rank " + std::to_string(locals_[l]) + " has " + std::to_string(bytes) +
                              " bytes where its sections need " + std::to_string(at));
  }
}

void Relay::merge_owner(size_t index) {
  Carried& carried = carried_[index];
  const size_t L = locals_.size();
  struct Request {
    int table, local;
    int64_t count;
    const std::byte* data;
  };
  std::vector<Request> requests;
  std::vector<Run> runs;
  std::vector<const std::byte*> data;
  int64_t total = 0;
  for (size_t l = 0; l < L; ++l) {
    runs.clear();
    data.clear();
    read_ids_header(*plan_, locals_[l], sections_[index * L + l], section_bytes_[index * L + l], 0, &runs, &data);
    for (size_t r = 0; r < runs.size(); ++r) {
      requests.push_back({runs[r].table, static_cast<int>(l), runs[r].count, data[r]});
      total += runs[r].count;
    }
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const Request& a, const Request& b) { return a.table < b.table; });
  carried.tables.clear();
  carried.runs.clear();
  carried.ids.grow(total);
  carried.map.grow(total);
  int64_t map_at = 0, id_at_start = 0;
  for (size_t begin = 0; begin < requests.size();) {
    size_t end = begin;
    int64_t asked = 0;
    while (end < requests.size() && requests[end].table == requests[begin].table) asked += requests[end++].count;
    const int t = requests[begin].table;
    const Table& table = plan_->tables[t];
    Merged merged{t, 0, id_at_start, 0, 0, {}};
    uint64_t* ids = carried.ids.data() + id_at_start;
    Numbering numbering(asked);
    for (size_t r = begin; r < end; ++r) {
      const Request& request = requests[r];
      merged.parts.push_back({request.local, request.count, map_at, 0, 0});
      for (int64_t i = 0; i < request.count; ++i)
        carried.map[map_at++] = numbering.number_of(id_at(table, request.data, i), ids, &merged.count);
    }
    carried.runs.push_back({t, id_at_start, merged.count});
    id_at_start += merged.count;
    carried.tables.push_back(std::move(merged));
    begin = end;
  }
  carried.num_asked = total;
  carried.num_merged = id_at_start;
}

// Where every row lies in the messages of both sides.
void Relay::lay_out() {
  const size_t L = locals_.size();
  std::fill(row_bytes_.begin(), row_bytes_.end(), 0);
  std::fill(grad_bytes_.begin(), grad_bytes_.end(), 0);
  std::fill(local_row_bytes_.begin(), local_row_bytes_.end(), 0);
  std::fill(local_grad_bytes_.begin(), local_grad_bytes_.end(), 0);
  std::vector<int64_t> rows(L), grads(L);
  for (Carried& carried : carried_) {
    carried.row_starts.assign(local_row_bytes_.begin(), local_row_bytes_.end());
    carried.grad_starts.assign(local_grad_bytes_.begin(), local_grad_bytes_.end());
    std::fill(rows.begin(), rows.end(), 0);
    std::fill(grads.begin(), grads.end(), 0);
    for (Merged& merged : carried.tables) {
      const Table& table = plan_->tables[merged.table];
      const int64_t row = table.wire_row_bytes, grad = table.wire_grad_bytes;
      merged.row_offset = row_bytes_[carried.owner];
      merged.grad_offset = grad_bytes_[carried.owner];
      row_bytes_[carried.owner] += merged.count * row;
      grad_bytes_[carried.owner] += merged.count * grad;
      for (Part& part : merged.parts) {
        part.row_offset = rows[part.local];
        part.grad_offset = grads[part.local];
        rows[part.local] += part.count * row;
        grads[part.local] += part.count * grad;
      }
    }
    for (size_t l = 0; l < L; ++l) {
      local_row_bytes_[l] += aligned(rows[l]);
      local_grad_bytes_[l] += aligned(grads[l]);
    }
  }
}

void Relay::id_bytes(int64_t* bytes) const {
  std::fill(bytes, bytes + plan_->world_size, 0);
  for (const Carried& carried : carried_)
    bytes[carried.owner] =
        ids_section_bytes(*plan_, carried.runs.data(), carried.runs.data() + carried.runs.size());
}

void Relay::write_ids(const int64_t* destinations) const {
  for (const Carried& carried : carried_) {
    if (carried.runs.empty()) continue;
    const Run* begin = carried.runs.data();
    const Run* end = begin + carried.runs.size();
    std::byte* out = reinterpret_cast<std::byte*>(destinations[carried.owner]);
    write_ids_header(*plan_, begin, end, out);
    out += ids_header_bytes(*plan_, end - begin);
    for (const Run* run = begin; run != end; ++run) {
      const Table& table = plan_->tables[run->table];
      write_table_ids(table, carried.ids.data() + run->start, run->count, out);
      out += ids_bytes(table, run->count);
    }
  }
}

void Relay::hand_out(const int64_t* sources, const int64_t* destinations) const {
  plan_->threads->run(static_cast<int64_t>(carried_.size()), [&](int64_t o, int) {
    const Carried& carried = carried_[o];
    const std::byte* section = reinterpret_cast<const std::byte*>(sources[carried.owner]);
    for (const Merged& merged : carried.tables) {
      const int64_t row_bytes = plan_->tables[merged.table].wire_row_bytes;
      if (row_bytes == 0) continue;
      const std::byte* rows = section + merged.row_offset;
      for (const Part& part : merged.parts) {
        std::byte* out = reinterpret_cast<std::byte*>(destinations[part.local]) + carried.row_starts[part.local] +
                         part.row_offset;
        const uint32_t* map = carried.map.data() + part.map_start;
        for (int64_t i = 0; i < part.count; ++i) std::memcpy(out + i * row_bytes, rows + map[i] * row_bytes, row_bytes);
      }
    }
  });
}

void Relay::sum(const int64_t* sources, const int64_t* destinations) const {
  plan_->threads->run(static_cast<int64_t>(carried_.size()), [&](int64_t o, int) {
    const Carried& carried = carried_[o];
    std::byte* section = reinterpret_cast<std::byte*>(destinations[carried.owner]);
    for (const Merged& merged : carried.tables) {
      const Table& table = plan_->tables[merged.table];
      if (table.rounds_grads())
        sum_encoded(carried, merged, sources, section + merged.grad_offset);
      else
        sum_plain(carried, merged, sources, reinterpret_cast<float*>(section + merged.grad_offset));
    }
  });
}

const std::byte* Relay::gradients_of(const Carried& carried, const Part& part, const int64_t* sources) const {
  return reinterpret_cast<const std::byte*>(sources[part.local]) + carried.grad_starts[part.local] + part.grad_offset;
}

void Relay::sum_plain(const Carried& carried, const Merged& merged, const int64_t* sources, float* sums) const {
  const int dim = plan_->tables[merged.table].dim;
  // Rows are numbered by first occurrence, in the order in which they are visited here: the next number is a new row.
  uint32_t num_seen = 0;
  for (const Part& part : merged.parts) {
    const float* grads = reinterpret_cast<const float*>(gradients_of(carried, part, sources));
    const uint32_t* map = carried.map.data() + part.map_start;
    for (int64_t i = 0; i < part.count; ++i) {
      float* sum = sums + int64_t{map[i]} * dim;
      if (map[i] == num_seen) {
        std::memcpy(sum, grads + i * dim, dim * sizeof(float));
        ++num_seen;
      } else {
        add_row(sum, grads + i * dim, dim);
      }
    }
  }
}

// A row that one rank has a gradient for travels on as it came; the others are summed as float32 and encoded once.
void Relay::sum_encoded(const Carried& carried, const Merged& merged, const int64_t* sources, std::byte* out) const {
  const Table& table = plan_->tables[merged.table];
  const int64_t bytes = table.wire_grad_bytes;
  std::vector<float> sums(merged.count * table.dim);
  std::vector<bool> is_sum(merged.count);
  alignas(32) float space[kDimMax];
  uint32_t num_seen = 0;
  for (const Part& part : merged.parts) {
    const std::byte* grads = gradients_of(carried, part, sources);
    const uint32_t* map = carried.map.data() + part.map_start;
    for (int64_t i = 0; i < part.count; ++i) {
      const uint32_t row = map[i];
      if (row == num_seen) {
        std::memcpy(out + row * bytes, grads + i * bytes, bytes);
        ++num_seen;
        continue;
      }
      float* sum = sums.data() + int64_t{row} * table.dim;
      if (!is_sum[row]) decode_wire(table.grads_codec, out + row * bytes, table.dim, sum);
      is_sum[row] = true;
      decode_wire(table.grads_codec, grads + i * bytes, table.dim, space);
      add_row(sum, space, table.dim);
    }
  }
  for (int64_t row = 0; row < merged.count; ++row)
    if (is_sum[row]) encode_wire(table.grads_codec, sums.data() + row * table.dim, table.dim, out + row * bytes);
}

int64_t Relay::num_asked() const {
  int64_t total = 0;
  for (const Carried& carried : carried_) total += carried.num_asked;
  return total;
}

int64_t Relay::num_merged() const {
  int64_t total = 0;
  for (const Carried& carried : carried_) total += carried.num_merged;
  return total;
}

}  // namespace shoal::step
