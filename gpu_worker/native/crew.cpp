#include "crew.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#define LOADONCE_PAUSE() _mm_pause()
#else
#define LOADONCE_PAUSE() std::this_thread::yield()
#endif

namespace loadonce {
namespace {

// How often a helper looks for the next loop before it sleeps: tens of microseconds, as long as what lies
// between two loops of a step.
constexpr int kLooks = 1500;

class Crew {
 public:
  void run(int64_t count, Piece piece, void* work, int threads) {
    if (threads < 2 || count < 2 || busy_.test_and_set(std::memory_order_acquire)) {
      for (int64_t number = 0; number < count; ++number) piece(work, number);
      return;
    }
    for (; helpers_ < threads - 1; ++helpers_) std::thread([this] { help(); }).detach();
    piece_ = piece;
    work_ = work;
    done_.store(0, std::memory_order_relaxed);
    loop_ += 1;
    left_.store(loop_ << 32 | static_cast<uint64_t>(count));
    if (sleeping_.load()) {
      bell_.fetch_add(1);
      bell_.notify_all();
    }
    while (take()) {
    }
    while (done_.load(std::memory_order_acquire) < count) LOADONCE_PAUSE();
    busy_.clear(std::memory_order_release);
  }

 private:
  // Do one piece of the current loop, if any is left. Whoever holds a piece keeps the loop from ending, so
  // what describes it doesn't change meanwhile; the loop's number makes sure that the piece is of this one.
  bool take() {
    uint64_t seen = left_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen)) {
      if (left_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
        piece_(work_, static_cast<uint32_t>(seen) - 1);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  [[noreturn]] void help() {
    for (int looks = 0;;) {
      if (take()) {
        looks = 0;
      } else if (++looks < kLooks) {
        LOADONCE_PAUSE();
      } else {
        const int32_t heard = bell_.load();
        sleeping_.fetch_add(1);
        // Either the caller sees us asleep and rings, or we see its loop here.
        if (!static_cast<uint32_t>(left_.load())) bell_.wait(heard);
        sleeping_.fetch_sub(1);
        looks = 0;
      }
    }
  }

  std::atomic_flag busy_;  // a loop within a loop runs on the thread that meets it
  int helpers_ = 0;
  Piece piece_ = nullptr;
  void* work_ = nullptr;
  uint64_t loop_ = 0;
  alignas(64) std::atomic<uint64_t> left_{0};  // number of the loop, and how many of its pieces nobody has
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int32_t> bell_{0};
  std::atomic<int32_t> sleeping_{0};
};

}  // namespace

void share_out(int64_t count, Piece piece, void* work) {
  // Never destroyed: its helpers run until the process ends.
  static Crew& crew = *new Crew;
  crew.run(count, piece, work, at::get_num_threads());
}

}  // namespace loadonce
