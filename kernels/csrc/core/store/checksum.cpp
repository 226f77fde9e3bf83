#include "core/store/checksum.h"

#include <cstring>

#include "core/store/radix_sort.h"
#include "core/store/rowstore.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal {

RowHasher::RowHasher(size_t slot_bytes, size_t weight_bytes)
    : slot_bytes_(slot_bytes), weight_bytes_(weight_bytes), row_(slot_bytes + weight_bytes) {
  const size_t num_words = (row_.size() + 7) / 8;
  for (uint64_t word = 0; word < num_words; ++word) keys_.push_back(fmix64((word + 1) * kGolden64));
}

uint64_t RowHasher::hash(int64_t id, int64_t last_step, int64_t count, const std::byte* slots,
                         const std::byte* weights) {
  if (slot_bytes_ != 0) std::memcpy(row_.data(), slots, slot_bytes_);
  std::memcpy(row_.data() + slot_bytes_, weights, weight_bytes_);
  return mix(id, last_step, static_cast<uint64_t>(count), row_.data());
}

uint64_t RowHasher::sum_words(const std::byte* payload) const {
  const size_t num_whole = row_.size() / 8;
  const auto term = [](uint64_t word, uint64_t key) {
    const uint64_t mixed = word ^ key;
    return word + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
  };
  uint64_t sum = 0;
  size_t i = 0;
#if defined(__AVX2__)
  __m256i sums = _mm256_setzero_si256();
  for (; i + 4 <= num_whole; i += 4) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(payload + 8 * i));
    const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys_.data() + i));
    const __m256i mixed = _mm256_xor_si256(words, keys);
    const __m256i products = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    sums = _mm256_add_epi64(sums, _mm256_add_epi64(words, products));
  }
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
#endif
  for (; i < num_whole; ++i) {
    uint64_t word;
    std::memcpy(&word, payload + 8 * i, 8);
    sum += term(word, keys_[i]);
  }
  if (row_.size() % 8 != 0) {
    uint64_t word = 0;
    std::memcpy(&word, payload + 8 * num_whole, row_.size() % 8);
    sum += term(word, keys_[num_whole]);
  }
  return sum;
}

std::pair<int64_t, uint64_t> RowStore::block_checksum(uint32_t table, uint32_t block) const {
  bool is_owned;
  const std::shared_ptr<IdMap> map = require_block(table, block, &is_owned);
  const Arena& arena = arena_of(table);
  std::vector<uint32_t> slots = map->list_slots();
  radix_sort(&slots, [](uint32_t slot) { return uint64_t{slot}; });
  const RowHasher& hasher = *hashers_[tables_[table].arena];
  constexpr size_t kAhead = 8;
  std::pair<int64_t, uint64_t> result{0, 0};
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) arena.prefetch(slots[i + kAhead]);
    const std::byte* record = arena.record(slots[i]);
    if ((header(record)->state & kExists) == 0) continue;
    ++result.first;
    result.second += hasher.hash(record);
  }
  return result;
}

}  // namespace shoal
