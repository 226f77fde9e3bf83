#include "core/store/checksum.h"

#include <cstring>

#include "core/store/radix_sort.h"
#include "core/store/rowstore.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal {

namespace {

uint64_t term(uint64_t word, uint64_t key) {
  const uint64_t mixed = word ^ key;
  return word + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
}

uint64_t sum_words(const std::byte* bytes, size_t num_bytes, const uint64_t* keys) {
  const size_t num_whole = num_bytes / 8;
  uint64_t sum = 0;
  size_t i = 0;
#if defined(__AVX2__)
  if (num_whole >= 4) {
    __m256i sums = _mm256_setzero_si256();
    for (; i + 4 <= num_whole; i += 4) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 8 * i));
      const __m256i mixed = _mm256_xor_si256(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i)));
      const __m256i products = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
      sums = _mm256_add_epi64(sums, _mm256_add_epi64(words, products));
    }
    uint64_t lanes[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
    sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
#endif
  for (; i < num_whole; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    sum += term(word, keys[i]);
  }
  if (num_bytes % 8 != 0) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + 8 * num_whole, num_bytes % 8);
    sum += term(word, keys[num_whole]);
  }
  return sum;
}

size_t num_words(size_t bytes) { return (bytes + 7) / 8; }

}  // namespace

RowHasher::RowHasher(size_t slot_bytes, size_t weight_bytes) : slot_bytes_(slot_bytes), weight_bytes_(weight_bytes) {
  const size_t total = num_words(slot_bytes) + num_words(weight_bytes);
  for (uint64_t word = 0; word < total; ++word) keys_.push_back(fmix64((word + 1) * kGolden64));
}

uint64_t RowHasher::hash(int64_t id, int64_t last_step, int64_t count, const std::byte* slots,
                         const std::byte* weights) const {
  const uint64_t key = fmix64(static_cast<uint64_t>(id) + kGolden64);
  const uint64_t head = fmix64(key + ((static_cast<uint64_t>(last_step) << 32) | static_cast<uint64_t>(count)));
  const uint64_t* weight_keys = keys_.data() + num_words(slot_bytes_);
  return fmix64(head + sum_words(slots, slot_bytes_, keys_.data()) + sum_words(weights, weight_bytes_, weight_keys));
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
