// CRC-32C (Castagnoli), with the processor's instruction where it has one.
#include <algorithm>
#include <array>
#include <cstring>

#include "spillway.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

// One instruction has a latency of three cycles and can start every cycle: pieces are taken together.
constexpr int kTogether = 4;

struct Piece {
  const unsigned char* data;
  uint64_t bytes;
  uint32_t* crc;
};

using Advance = void (*)(Piece* pieces, int count);

const std::array<std::array<uint32_t, 256>, 8>& tables() {
  static const auto made = [] {
    std::array<std::array<uint32_t, 256>, 8> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
      t[0][i] = crc;
    }
    for (int level = 1; level < 8; ++level)
      for (uint32_t i = 0; i < 256; ++i) t[level][i] = (t[level - 1][i] >> 8) ^ t[0][t[level - 1][i] & 0xff];
    return t;
  }();
  return made;
}

void advance_portable(Piece* pieces, int count) {
  const auto& t = tables();
  for (int p = 0; p < count; ++p) {
    uint32_t crc = ~*pieces[p].crc;
    const unsigned char* at = pieces[p].data;
    uint64_t left = pieces[p].bytes;
    for (; left >= 8; left -= 8, at += 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      word ^= crc;
      crc = 0;
      for (int byte = 0; byte < 8; ++byte) crc ^= t[7 - byte][(word >> (8 * byte)) & 0xff];
    }
    for (; left > 0; --left, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 0xff];
    *pieces[p].crc = ~crc;
  }
}

#if defined(__x86_64__)
#define SPILLWAY_CRC_TARGET __attribute__((target("sse4.2")))
#define SPILLWAY_CRC64(crc, word) uint32_t(_mm_crc32_u64(crc, word))
#define SPILLWAY_CRC8(crc, byte) _mm_crc32_u8(crc, byte)
#elif defined(__aarch64__)
#define SPILLWAY_CRC_TARGET __attribute__((target("+crc")))
#define SPILLWAY_CRC64(crc, word) __crc32cd(crc, word)
#define SPILLWAY_CRC8(crc, byte) __crc32cb(crc, byte)
#endif

#if defined(SPILLWAY_CRC_TARGET)
SPILLWAY_CRC_TARGET void advance_hardware(Piece* pieces, int count) {
  uint64_t common = pieces[0].bytes;
  for (int p = 1; p < count; ++p) common = std::min(common, pieces[p].bytes);
  common = common / 8 * 8;
  if (count == kTogether) {
    uint32_t crc[kTogether];
    for (int p = 0; p < kTogether; ++p) crc[p] = ~*pieces[p].crc;
    for (uint64_t at = 0; at < common; at += 8) {
      for (int p = 0; p < kTogether; ++p) {
        uint64_t word;
        std::memcpy(&word, pieces[p].data + at, 8);
        crc[p] = SPILLWAY_CRC64(crc[p], word);
      }
    }
    for (int p = 0; p < kTogether; ++p) *pieces[p].crc = ~crc[p];
  } else {
    common = 0;
  }
  for (int p = 0; p < count; ++p) {
    uint32_t crc = ~*pieces[p].crc;
    uint64_t at = common;
    for (; at + 8 <= pieces[p].bytes; at += 8) {
      uint64_t word;
      std::memcpy(&word, pieces[p].data + at, 8);
      crc = SPILLWAY_CRC64(crc, word);
    }
    for (; at < pieces[p].bytes; ++at) crc = SPILLWAY_CRC8(crc, pieces[p].data[at]);
    *pieces[p].crc = ~crc;
  }
}

bool has_hardware() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

Advance pick() { return has_hardware() ? advance_hardware : advance_portable; }
#else
Advance pick() { return advance_portable; }
#endif

}  // namespace

void spillway_crc32c(const void* data, uint64_t bytes, uint64_t first_bytes, uint64_t piece_bytes, uint32_t* crcs,
                     int32_t threads) {
  static const Advance advance = pick();
  if (bytes == 0 || piece_bytes == 0) return;
  const auto* start = static_cast<const unsigned char*>(data);
  first_bytes = std::min(first_bytes, bytes);
  const uint64_t count = 1 + (bytes - first_bytes + piece_bytes - 1) / piece_bytes;
  const auto piece = [&](uint64_t i) {
    if (i == 0) return Piece{start, first_bytes, crcs};
    const uint64_t at = first_bytes + (i - 1) * piece_bytes;
    return Piece{start + at, std::min(piece_bytes, bytes - at), crcs + i};
  };
  ThreadPool::shared().run((count + kTogether - 1) / kTogether, threads, [&](uint64_t task) {
    Piece pieces[kTogether];
    int taken = 0;
    for (uint64_t i = task * kTogether; i < std::min(count, (task + 1) * kTogether); ++i) pieces[taken++] = piece(i);
    advance(pieces, taken);
  });
}
