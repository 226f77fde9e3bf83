#include "shm/frame.h"

#include <algorithm>
#include <cstring>

namespace shoal {
namespace {

// Order matters: the same multiset of sizes in another order is another layout.
uint64_t sections_hash(const int64_t* sections, int64_t num_sections, int64_t world, int64_t rank) {
  uint64_t h = 0x9E3779B97F4A7C15ull;
  for (int64_t s = 0; s < num_sections; ++s) {
    h = (h ^ static_cast<uint64_t>(sections[s * world + rank])) * 0xFF51AFD7ED558CCDull;
    h ^= h >> 33;
  }
  return h;
}

int64_t total_bytes(const int64_t* sections, int64_t num_sections, int64_t world, int64_t rank) {
  int64_t total = 0;
  for (int64_t s = 0; s < num_sections; ++s) total += sections[s * world + rank];
  return total;
}

uint64_t trailer_of(const FramePrefix& p) { return kTrailerMagic ^ (static_cast<uint64_t>(p.sequence) << 16); }

}  // namespace

void frame_layout(const int64_t* sections, int64_t num_sections, int64_t world, int64_t* offsets, int64_t* sizes) {
  for (int64_t w = 0; w < world; ++w) {
    int64_t at = sizeof(FramePrefix);
    for (int64_t s = 0; s < num_sections; ++s) {
      offsets[s * world + w] = at;
      at += align_up(sections[s * world + w]);
    }
    sizes[w] = at + static_cast<int64_t>(sizeof(uint64_t));
  }
}

void frame_write(const FramePrefix& common, const int64_t* bases, const int64_t* sections, int64_t num_sections,
                 int64_t world, const int64_t* sizes) {
  for (int64_t w = 0; w < world; ++w) {
    char* base = reinterpret_cast<char*>(bases[w]);
    FramePrefix p = common;
    p.section_bytes = total_bytes(sections, num_sections, world, w);
    p.sections_hash = sections_hash(sections, num_sections, world, w);
    std::memcpy(base, &p, sizeof p);
    const uint64_t trailer = trailer_of(p);
    std::memcpy(base + sizes[w] - sizeof trailer, &trailer, sizeof trailer);
  }
}

FrameFault frame_check(const FramePrefix& common, const int64_t* bases, const int64_t* sections, int64_t num_sections,
                       int64_t world, const int64_t* sizes, int64_t* statuses, int64_t* applied) {
  FrameFault fault;
  for (int64_t w = 0; w < world; ++w) {
    const char* base = reinterpret_cast<const char*>(bases[w]);
    FramePrefix p;
    std::memcpy(&p, base, sizeof p);
    uint64_t trailer;
    std::memcpy(&trailer, base + sizes[w] - sizeof trailer, sizeof trailer);
    const uint64_t got[] = {p.magic,
                            p.epoch,
                            static_cast<uint64_t>(p.step),
                            p.kind,
                            p.plan_hash,
                            p.sender,
                            p.sequence,
                            p.num_sections,
                            static_cast<uint64_t>(p.section_bytes),
                            p.sections_hash,
                            trailer};
    const uint64_t want[] = {common.magic,
                             common.epoch,
                             static_cast<uint64_t>(common.step),
                             common.kind,
                             common.plan_hash,
                             static_cast<uint64_t>(w),
                             common.sequence,
                             static_cast<uint64_t>(num_sections),
                             static_cast<uint64_t>(total_bytes(sections, num_sections, world, w)),
                             sections_hash(sections, num_sections, world, w),
                             trailer_of(common)};
    for (int f = 0; f < 11; ++f) {
      if (got[f] != want[f] && fault.rank < 0) fault = {w, f, got[f], want[f]};
    }
    statuses[w] = p.status;
    applied[w] = p.applied;
  }
  return fault;
}

void header_write(const int64_t* bases, const void* header, int64_t header_bytes, int64_t sections_offset,
                  const int64_t* sections, int64_t num_sections, int64_t world) {
  for (int64_t w = 0; w < world; ++w) {
    char* base = reinterpret_cast<char*>(bases[w]);
    std::memcpy(base, header, static_cast<size_t>(header_bytes));
    for (int64_t s = 0; s < num_sections; ++s) {
      std::memcpy(base + sections_offset + 8 * s, &sections[s * world + w], 8);
    }
  }
}

HeaderSummary header_read(const int64_t* addresses, int64_t world, int64_t num_sections, int64_t section_bytes_max,
                          int64_t* out, int64_t* sections) {
  using L = HeaderLayout;
  HeaderSummary summary;
  for (int64_t w = 0; w < world; ++w) {
    int64_t* header = out + w * L::kWords;
    std::memcpy(header, reinterpret_cast<const void*>(addresses[w]), L::kWords * sizeof(int64_t));
    if (std::memcmp(header, out, L::kAgreedWords * sizeof(int64_t)) != 0 || header[L::kRank] != w) {
      summary.is_agreed = false;
    }
    summary.applied_min = std::min(summary.applied_min, header[L::kApplied]);
    summary.acked_min = std::min(summary.acked_min, header[L::kAcked]);
    summary.flags |= static_cast<uint64_t>(header[L::kFlags]);
    double denominator;
    std::memcpy(&denominator, header + L::kDenominator, sizeof denominator);
    summary.denominator += denominator;
    for (int64_t s = 0; s < num_sections; ++s) {
      const int64_t bytes = header[L::kSections + s];
      if (bytes < 0 || bytes > section_bytes_max) summary.has_bad_sections = true;
      sections[s * world + w] = bytes;
    }
  }
  return summary;
}

}  // namespace shoal
