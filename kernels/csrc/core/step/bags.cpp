// The pooled flow: owners return partial sums of bags instead of rows, and receive gradients of bags.
//
// A unit is what one bag holds of one row block, in position order (of one owner where units need not be exact). The
// requester adds a bag's partial sums in block order, whoever made them: placement does not change bits (S5). What this
// rank owns itself takes the same way through messages to itself. Sections for an owner:
//
//   ids        after the ids, per table that is pooled there and feature of it: uint32 units, positions, bags, 0; per
//              unit 2 * positions + (1 where its bag is another than the last unit's); per position the number of its id
//              among the table's ids in this section; per position the float32 weight if the feature is weighted; per bag
//              the ids it holds, at all owners, if the feature is a MEAN. Padded to 8 bytes.
//   values     after the rows: a partial sum per unit, encoded
//   gradients  after the rows: a gradient per bag, encoded; it is multiplied per position and summed per row by the
//              owner, in the order of segments.cpp
#include <algorithm>
#include <cstring>

#include "core/step/lookup.h"
#include "core/step/simd.h"

namespace shoal::step {
namespace {

constexpr int64_t kSegment = 512;  // as in segments.cpp
constexpr int64_t kUnitsPerTask = 256;
constexpr int64_t kHeaderWords = 4;

[[noreturn]] void violation(int peer, const std::string& what) {
  throw ProtocolViolation("the bags in the ids section from rank " + std::to_string(peer) + " " + what);
}

int64_t num_words(const Feature& feature, int64_t units, int64_t positions, int64_t bags) {
  return kHeaderWords + units + positions * (feature.is_weighted ? 2 : 1) +
         (feature.pooling == Pooling::kMean ? bags : 0);
}

}  // namespace

// Cuts the bags of all pooled tables into units, and counts what each owner is to be told.
void Lookup::cut_bags() {
  const int W = plan_->world_size;
  units_.clear();
  bag_counts_.assign(static_cast<size_t>(plan_->num_features()) * W, {});
  bag_words_.assign(W, 0);
  uint32_t* place = place_.grow(num_positions_);
  uint32_t* positions = unit_positions_.grow(num_positions_);
  for (const Run& run : outgoing_.runs)
    if (plan_->tables[run.table].is_pooled)
      for (int64_t i = 0; i < run.count; ++i) place[order_[run.start + i]] = static_cast<uint32_t>(i);
  const uint32_t dropped = static_cast<uint32_t>(num_positions_);
  std::vector<std::pair<uint32_t, uint32_t>> bag;  // (unit's key, position)
  std::vector<uint32_t> last_bag(W);
  feature_units_.assign(plan_->num_features(), {0, 0});
  uint32_t next = 0;
  for (const Table& table : plan_->tables) {
    if (!table.is_pooled) continue;
    for (int f : table.features) {
      feature_units_[f].first = static_cast<int64_t>(units_.size());
      BagCount* counts = bag_counts_.data() + static_cast<size_t>(f) * W;
      std::fill(last_bag.begin(), last_bag.end(), ~uint32_t{0});
      const uint32_t* bags = bag_offsets_.data() + f * (batch_size_ + 1);
      for (int64_t b = 0; b < batch_size_; ++b) {
        bag.clear();
        bool is_sorted = true;
        for (uint32_t p = bags[b]; p < bags[b + 1]; ++p) {
          const uint32_t u = inverse_[p];
          if (u == dropped) continue;
          uint32_t key = 0;
          if (table.sums_by_owner)
            key = table.has_one_owner ? 0 : unique_owner_[u];
          else
            key = row_block(static_cast<int64_t>(unique_ids_[u]), table.log2_blocks);
          if (!bag.empty() && key < bag.back().first) is_sorted = false;
          bag.emplace_back(key, p);
        }
        if (!is_sorted) std::sort(bag.begin(), bag.end());  // positions ascend within a key: stable
        for (size_t i = 0; i < bag.size();) {
          const uint32_t key = bag[i].first, first = next;
          const uint16_t owner = table.has_one_owner ? table.owners[0] : unique_owner_[inverse_[bag[i].second]];
          for (; i < bag.size() && bag[i].first == key; ++i) positions[next++] = bag[i].second;
          BagCount& count = counts[owner];
          units_.push_back({static_cast<uint32_t>(b), first, next - first, static_cast<uint32_t>(count.units), owner,
                            last_bag[owner] != static_cast<uint32_t>(b), static_cast<uint32_t>(bag.size())});
          last_bag[owner] = static_cast<uint32_t>(b);
          ++count.units;
          count.positions += units_.back().count;
          count.bags += units_.back().is_new_bag;
        }
      }
      feature_units_[f].second = static_cast<int64_t>(units_.size());
    }
  }
  for (int p = 0; p < W; ++p) {
    int64_t values = 0, grads = 0;
    for_bag_features(outgoing_, p, [&](const Run&, const Table& table, int f) {
      const BagCount& count = bag_counts_[static_cast<size_t>(f) * W + p];
      bag_words_[p] += num_words(plan_->features[f], count.units, count.positions, count.bags);
      values += count.units * table.unit_bytes;
      grads += count.bags * table.bag_grad_bytes;
    });
    bag_words_[p] += bag_words_[p] % 2;
    if (p == plan_->rank) continue;
    const bool is_far = plan_->is_far(p);
    outgoing_.sum_bytes[p] = is_far ? values : 0;
    outgoing_.bag_grad_bytes[p] = is_far ? grads : 0;
    outgoing_.row_bytes[p] += is_far ? 0 : values;
    outgoing_.grad_bytes[p] += is_far ? 0 : grads;
  }
}

void Lookup::write_bags(int p, uint32_t* out) const {
  uint32_t* const begin = out;
  for_bag_features(outgoing_, p, [&](const Run&, const Table&, int f) {
    const Feature& feature = plan_->features[f];
    const BagCount& count = bag_counts_[static_cast<size_t>(f) * plan_->world_size + p];
    *out++ = static_cast<uint32_t>(count.units);
    *out++ = static_cast<uint32_t>(count.positions);
    *out++ = static_cast<uint32_t>(count.bags);
    *out++ = 0;
    uint32_t* inverse = out + count.units;
    uint32_t* weights = inverse + count.positions;
    uint32_t* kept = weights + (feature.is_weighted ? count.positions : 0);
    const int64_t shift = value_start_[f] - feature_start_[f];
    for (int64_t i = feature_units_[f].first; i < feature_units_[f].second; ++i) {
      const BagUnit& unit = units_[i];
      if (unit.owner != p) continue;
      *out++ = unit.count << 1 | static_cast<uint32_t>(unit.is_new_bag);
      for (uint32_t j = unit.first; j < unit.first + unit.count; ++j) {
        *inverse++ = place_[inverse_[unit_positions_[j]]];
        if (feature.is_weighted) std::memcpy(weights++, weights_ + unit_positions_[j] + shift, 4);
      }
      if (feature.pooling == Pooling::kMean && unit.is_new_bag) *kept++ = unit.kept;
    }
    out = feature.pooling == Pooling::kMean ? kept : feature.is_weighted ? weights : inverse;
  });
  if ((out - begin) % 2) *out = 0;
}

// Reads what rank `p` says of its bags. Nothing is trusted: sizes before they are used, then every number.
void Lookup::read_bags(int p, const std::byte* data, int64_t bytes) {
  if (bytes % 8) violation(p, "have " + std::to_string(bytes) + " bytes");
  const int64_t words = bytes / 4;
  std::vector<uint32_t>& copy = bag_sections_[p];  // the message's memory is used again
  copy.resize(words);
  if (words) std::memcpy(copy.data(), data, bytes);
  int64_t at = 0;
  std::vector<uint8_t> is_used;
  for_bag_features(incoming_, p, [&](const Run& run, const Table& table, int f) {
    const Feature& feature = plan_->features[f];
    if (words - at < kHeaderWords) violation(p, "are cut short");
    BagPart part;
    part.run = static_cast<int64_t>(&run - incoming_.runs.data());
    part.feature = f;
    part.units = copy[at];
    part.positions = copy[at + 1];
    part.bags = copy[at + 2];
    if (num_words(feature, part.units, part.positions, part.bags) > words - at)
      violation(p, "claim more than their " + std::to_string(bytes) + " bytes");
    part.lengths = copy.data() + at + kHeaderWords;
    part.inverse = part.lengths + part.units;
    const uint32_t* rest = part.inverse + part.positions;
    part.weights = feature.is_weighted ? rest : nullptr;
    part.kept = feature.pooling == Pooling::kMean ? rest + (feature.is_weighted ? part.positions : 0) : nullptr;
    at += num_words(feature, part.units, part.positions, part.bags);
    int64_t total = 0, bags = 0;
    part.begins.resize(part.units + 1);
    for (int64_t i = 0; i < part.units; ++i) {
      part.begins[i] = static_cast<uint32_t>(total);
      total += part.lengths[i] >> 1;
      bags += part.lengths[i] & 1;
      if (part.lengths[i] < 2 || bags == 0 || total > part.positions) violation(p, "have units that cannot be");
    }
    part.begins[part.units] = static_cast<uint32_t>(total);
    if (total != part.positions || bags != part.bags) violation(p, "have counts that do not add up");
    if (f == table.features.front()) is_used.assign(run.count, 0);
    for (int64_t i = 0; i < part.positions; ++i) {
      if (part.inverse[i] >= run.count)
        violation(p, "name id " + std::to_string(part.inverse[i]) + " of " + std::to_string(run.count));
      is_used[part.inverse[i]] = 1;
    }
    for (int64_t i = 0; part.kept && i < part.bags; ++i)
      if (part.kept[i] == 0) violation(p, "have an empty bag");
    if (f == table.features.back() && std::count(is_used.begin(), is_used.end(), 0))
      violation(p, "leave ids of table " + std::to_string(run.table) + " out");
    if (p != plan_->rank) {
      incoming_.row_bytes[p] += part.units * table.unit_bytes;
      incoming_.grad_bytes[p] += part.bags * table.bag_grad_bytes;
    }
    bag_parts_[p].push_back(std::move(part));
  });
  if (words - at != at % 2) violation(p, "have bytes that belong to nothing");
}

// Owner: the partial sums that rank `p` asked for.
void Lookup::write_partial_sums(int p, std::byte* out) const {
  for (const BagPart& part : bag_parts_[p]) {
    const Run& run = incoming_.runs[part.run];
    const Table& table = plan_->tables[run.table];
    const Arena& arena = plan_->store->arena_of(run.table);
    const uint32_t* slots = incoming_slots_.data() + run.start;
    const int64_t* ids = incoming_run_ids_[part.run];
    const int dim = table.dim;
    auto row_of = [&](uint32_t i, float* space) -> const float* {
      if (slots[i] == kNoSlot) {
        initial_row(plan_->store->table(run.table), ids[i], space);
        return space;
      }
      const std::byte* weights = arena.weights(slots[i]);
      if (table.type == RowType::F32) return reinterpret_cast<const float*>(weights);
      decode_row(table.type, weights, static_cast<uint32_t>(dim), space);
      return space;
    };
    plan_->threads->run((part.units + kUnitsPerTask - 1) / kUnitsPerTask, [&](int64_t task, int) {
      alignas(32) float sum[kDimMax], space[kDimMax];
      const int64_t end = std::min(part.units, (task + 1) * kUnitsPerTask);
      for (int64_t i = task * kUnitsPerTask; i < end; ++i) {
        const uint32_t first = part.begins[i], last = part.begins[i + 1];
        for (uint32_t j = first; j < last; ++j) {
          if (j + 8 < part.positions && slots[part.inverse[j + 8]] != kNoSlot) arena.prefetch(slots[part.inverse[j + 8]]);
          const float* x = row_of(part.inverse[j], space);
          float w = 1.f;
          if (part.weights) std::memcpy(&w, part.weights + j, 4);
          if (j == first)
            for (int d = 0; d < dim; ++d) sum[d] = x[d] * w;
          else
            for (int d = 0; d < dim; ++d) sum[d] = sum[d] + x[d] * w;
        }
        encode_wire(table.values_codec, sum, dim, out + i * table.unit_bytes);
      }
    });
    out += part.units * table.unit_bytes;
  }
}

// Requester: adds the partial sums of each bag. `sources`: where each rank's partial sums begin.
void Lookup::add_partial_sums(std::vector<const std::byte*> sources, float* const* outputs) const {
  const int W = plan_->world_size;
  alignas(32) float space[kDimMax];
  for (const Table& table : plan_->tables) {
    if (!table.is_pooled) continue;
    const int dim = table.dim;
    for (int f : table.features) {
      const Feature& feature = plan_->features[f];
      const int64_t stride = plan_->output_strides[feature.output];
      float* output = outputs[feature.output] + feature.column;
      for (int64_t b = 0; b < batch_size_; ++b) std::memset(output + b * stride, 0, dim * sizeof(float));
      const int64_t end = feature_units_[f].second;
      for (int64_t i = feature_units_[f].first; i < end;) {
        const uint32_t bag = units_[i].bag;
        float* out = output + bag * stride;
        const float scale =
            feature.pooling == Pooling::kMean && units_[i].kept > 1 ? 1.f / static_cast<float>(units_[i].kept) : 1.f;
        bool is_first = true;
        for (; i < end && units_[i].bag == bag; ++i) {
          const std::byte* wire = sources[units_[i].owner] + units_[i].number * table.unit_bytes;
          const float* sum = reinterpret_cast<const float*>(wire);
          if (table.values_codec != Codec::kFp32) {
            decode_wire(table.values_codec, wire, dim, space);
            sum = space;
          }
          if (is_first)
            std::memcpy(out, sum, dim * sizeof(float));
          else
            for (int d = 0; d < dim; ++d) out[d] = out[d] + sum[d];
          is_first = false;
        }
        if (scale != 1.f)
          for (int d = 0; d < dim; ++d) out[d] = out[d] * scale;
      }
      for (int p = 0; p < W; ++p) sources[p] += bag_counts_[static_cast<size_t>(f) * W + p].units * table.unit_bytes;
    }
  }
}

// Requester: the gradients of the bags that hold rows of rank `p`.
void Lookup::write_bag_grads(int p, std::byte* out) const {
  for_bag_features(outgoing_, p, [&](const Run&, const Table& table, int f) {
    const Feature& feature = plan_->features[f];
    const int64_t stride = plan_->output_strides[feature.output];
    const float* grad = grads_[feature.output] + feature.column;
    for (int64_t i = feature_units_[f].first; i < feature_units_[f].second; ++i) {
      const BagUnit& unit = units_[i];
      if (unit.owner != p || !unit.is_new_bag) continue;
      encode_wire(table.grads_codec, grad + unit.bag * stride, table.dim, out);
      out += table.bag_grad_bytes;
    }
  });
}

// Owner: sums the gradients of rank `p`'s bags by row; run_sums_ then tells where the rows of each pooled run lie.
void Lookup::scatter_bag_grads(int p, const std::byte* grads) {
  std::vector<uint32_t> ends, entries;
  std::vector<float> scales;
  for (size_t first_part = 0; first_part < bag_parts_[p].size();) {
    const int64_t r = bag_parts_[p][first_part].run;
    const Run& run = incoming_.runs[r];
    const Table& table = plan_->tables[run.table];
    const int dim = table.dim;
    size_t last_part = first_part;
    int64_t num_bags = 0;
    ends.assign(run.count + 1, 0);
    for (; last_part < bag_parts_[p].size() && bag_parts_[p][last_part].run == r; ++last_part) {
      const BagPart& part = bag_parts_[p][last_part];
      num_bags += part.bags;
      for (int64_t i = 0; i < part.positions; ++i) ++ends[part.inverse[i] + 1];
    }
    for (int64_t i = 0; i < run.count; ++i) ends[i + 1] += ends[i];
    entries.resize(ends[run.count]);
    scales.resize(ends[run.count]);
    std::vector<uint32_t> cursor(ends.begin(), ends.end() - 1);
    int64_t bag = -1;
    for (size_t n = first_part; n < last_part; ++n) {
      const BagPart& part = bag_parts_[p][n];
      int64_t bag_of_part = -1;
      float scale = 1.f;
      for (int64_t i = 0; i < part.units; ++i) {
        if (part.lengths[i] & 1) {
          ++bag;
          ++bag_of_part;
          const uint32_t kept = part.kept ? part.kept[bag_of_part] : 1;
          scale = kept > 1 ? 1.f / static_cast<float>(kept) : 1.f;
        }
        for (uint32_t j = part.begins[i]; j < part.begins[i + 1]; ++j) {
          const uint32_t e = cursor[part.inverse[j]]++;
          float w = 1.f;
          if (part.weights) std::memcpy(&w, part.weights + j, 4);
          entries[e] = static_cast<uint32_t>(bag);
          scales[e] = part.weights ? w * scale : scale;
        }
      }
    }
    const float* bag_grads = reinterpret_cast<const float*>(grads);
    if (table.grads_codec != Codec::kFp32) {
      float* to = decoded_grads_.grow(num_bags * dim);
      for (int64_t b = 0; b < num_bags; ++b)
        decode_wire(table.grads_codec, grads + b * table.bag_grad_bytes, dim, to + b * dim);
      bag_grads = to;
    }
    std::vector<float>& sums = run_sums_[r];
    sums.resize(run.count * dim);
    plan_->threads->run((run.count + kUnitsPerTask - 1) / kUnitsPerTask, [&](int64_t task, int) {
      alignas(32) float segment[kDimMax];
      const int64_t end = std::min(run.count, (task + 1) * kUnitsPerTask);
      for (int64_t i = task * kUnitsPerTask; i < end; ++i) {
        for (uint32_t begin = ends[i]; begin < ends[i + 1]; begin += kSegment) {
          float* sum = begin == ends[i] ? sums.data() + i * dim : segment;
          const uint32_t stop = std::min<uint32_t>(begin + kSegment, ends[i + 1]);
          for (uint32_t e = begin; e < stop; ++e) {
            const float* x = bag_grads + int64_t{entries[e]} * dim;
            if (e == begin)
              for (int d = 0; d < dim; ++d) sum[d] = x[d] * scales[e];
            else
              for (int d = 0; d < dim; ++d) sum[d] = sum[d] + x[d] * scales[e];
          }
          if (sum == segment)
            for (int d = 0; d < dim; ++d) sums[i * dim + d] = sums[i * dim + d] + segment[d];
        }
      }
    });
    grads += num_bags * table.bag_grad_bytes;
    first_part = last_part;
  }
}

}  // namespace shoal::step
