// Divides a loop among threads so that nobody waits for a thread that doesn't get a processor.
//
// The caller and its helpers take pieces from one counter. A helper that other processes keep from running
// takes none, and the caller does them all: beside a busy broker a step takes as long as on one core, not as
// long as its slowest thread's turn on the processor, hundreds of times.
#pragma once

#include <cstdint>
#include <type_traits>

namespace loadonce {

using Piece = void (*)(void* work, int64_t number);

// Call piece(work, n) once for each n below `count`, in any order and on any thread, and return when all
// have returned. Uses up to torch's number of threads; a call while another is on, or from within one, runs alone.
void share_out(int64_t count, Piece piece, void* work);

template <typename Work>
inline void share_out(int64_t count, Work&& work) {
  using Plain = std::remove_reference_t<Work>;
  share_out(count, [](void* at, int64_t number) { (*static_cast<Plain*>(at))(number); }, &work);
}

}  // namespace loadonce
