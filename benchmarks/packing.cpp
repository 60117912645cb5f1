/// Loads and unloads models, as a server does whose pool is nearly full, and says how well a packer
/// uses the chunks. Needs neither memory nor a GPU: only the decisions are made.
///
/// A request names a model by a Zipf distribution. If the model is not there, the longest unused ones are
/// unloaded until it would fit below the occupancy, and it is loaded. A load that is refused though
/// the pool has enough free bytes is counted, and one more model unloaded for it.
///
/// From time to time the state is copied and the copy filled up, with the tensors of the most popular
/// models that are not there, one by one, up to the first that is refused although it is smaller than
/// what is free. What the copy's chunks then have free was not allocatable.
///
/// One JSON object on standard output.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <list>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "benchmarks/model_sizes.hpp"
#include "benchmarks/packers.hpp"
#include "memhandover/base/bytes.hpp"

namespace {

using namespace sluice;
using namespace sluice::benchmarks;
using std::chrono::steady_clock;

struct settings {
  std::string packer = "tensors";
  double occupancy_percent = 95.0;
  std::uint64_t pool_bytes = 141'000'000'000;
  std::uint64_t chunk_bytes = 64_MiB;
  std::uint64_t alignment = 256;
  int models = 200;
  int operations = 100'000;
  int probe_every = 500;
  double zipf = 1.0;
  std::uint64_t seed = 1;
};

class server {
 public:
  explicit server(settings const& how)
      : how_(how),
        random_(how.seed),
        models_(catalogue(how.models, 45_MiB, 6_GiB, random_)),
        where_(models_.size(), used_.end()) {
    auto const chunks = static_cast<std::uint32_t>(how.pool_bytes / how.chunk_bytes);
    pool_bytes_ = chunks * how.chunk_bytes;
    packer_ = make_packer(how.packer, how.chunk_bytes, chunks, how.alignment);
    std::vector<double> weights;
    for (std::size_t rank = 1; rank <= models_.size(); ++rank) {  // the catalogue has no order
      weights.push_back(1.0 / std::pow(static_cast<double>(rank), how.zipf));
      bytes_.push_back(
          std::accumulate(models_[rank - 1].begin(), models_[rank - 1].end(), std::uint64_t{0}));
    }
    popularity_ = std::discrete_distribution<std::size_t>(weights.begin(), weights.end());
  }

  nlohmann::json run() {
    while (operations_ < how_.operations) {
      request(popularity_(random_));
    }
    return {{"load_us", load_us_},
            {"unload_us", unload_us_},
            {"stitched_ranges", stitched_ranges_},
            {"stitched_chunks", stitched_chunks_},
            {"touched_chunks", touched_},
            {"kept_chunks", kept_},
            {"waste_percent", waste_},
            {"hole_percent", holes_},
            {"occupancy_percent", occupancy_},
            {"refused", refused_},
            {"loads", load_us_.size()},
            {"returned_percent", 100.0 * static_cast<double>(returned_bytes_) /
                                     static_cast<double>(std::max<std::uint64_t>(gone_bytes_, 1))}};
  }

 private:
  void request(std::size_t model) {
    if (where_[model] != used_.end()) {
      used_.splice(used_.end(), used_, where_[model]);
      return;
    }
    auto const limit = static_cast<std::uint64_t>(how_.occupancy_percent / 100.0 *
                                                  static_cast<double>(pool_bytes_));
    while (live_ + bytes_[model] > limit) {
      unload();
    }
    is_full_ = is_full_ || operations_ > how_.models;
    while (!load(model)) {
      ++refused_;
      unload();
    }
    if (is_full_ && operations_ >= next_probe_) {
      next_probe_ = operations_ + how_.probe_every;
      probe();
    }
  }

  bool load(std::size_t model) {
    auto const begin = steady_clock::now();
    auto const cost = packer_->load(model, models_[model]);
    auto const end = steady_clock::now();
    if (!cost) {
      return false;
    }
    ++operations_;
    load_us_.push_back(std::chrono::duration<double, std::micro>{end - begin}.count());
    stitched_ranges_.push_back(cost->stitched_ranges);
    stitched_chunks_.push_back(cost->stitched_chunks);
    touched_.push_back(cost->touched_chunks);
    live_ += bytes_[model];
    where_[model] = used_.insert(used_.end(), model);
    return true;
  }

  void unload() {
    auto const model = used_.front();
    auto const begin = steady_clock::now();
    auto const gain = packer_->unload(model);
    auto const end = steady_clock::now();
    ++operations_;
    unload_us_.push_back(std::chrono::duration<double, std::micro>{end - begin}.count());
    kept_.push_back(gain.kept_chunks);
    live_ -= bytes_[model];
    gone_bytes_ += bytes_[model];
    returned_bytes_ += gain.emptied_chunks * how_.chunk_bytes;
    used_.pop_front();
    where_[model] = used_.end();
  }

  void probe() {
    auto const percent = [&](std::uint64_t bytes) {
      return 100.0 * static_cast<double>(bytes) / static_cast<double>(pool_bytes_);
    };
    auto const padding = packer_->live_bytes() - live_;
    holes_.push_back(percent(packer_->held_bytes() - live_));
    occupancy_.push_back(percent(live_));
    if (!packer_->shares_chunks()) {
      waste_.push_back(holes_.back());
      return;
    }
    auto const filled = packer_->copy();
    fill(*filled);
    waste_.push_back(percent(filled->held_bytes() - filled->live_bytes() + padding));
  }

  void fill(packer& to) const {
    auto name = static_cast<std::uint64_t>(models_.size());
    for (std::size_t model = 0; model < models_.size(); ++model) {
      if (where_[model] != used_.end()) {
        continue;
      }
      for (auto const tensor : models_[model]) {
        bool const fits = tensor + how_.alignment <= pool_bytes_ - to.live_bytes();
        if (fits && !to.load(name++, std::span{&tensor, 1})) {
          return;
        }
      }
    }
  }

  settings how_;
  std::mt19937_64 random_;
  std::vector<tensor_sizes> models_;
  std::vector<std::uint64_t> bytes_;
  std::discrete_distribution<std::size_t> popularity_;
  std::unique_ptr<packer> packer_;
  std::uint64_t pool_bytes_ = 0;
  std::uint64_t live_ = 0;       // as the models want, without rounding
  std::list<std::size_t> used_;  // the longest unused first
  std::vector<std::list<std::size_t>::iterator> where_;
  int operations_ = 0;
  int next_probe_ = 0;
  bool is_full_ = false;

  std::vector<double> load_us_, unload_us_, waste_, holes_, occupancy_;
  std::vector<std::uint32_t> stitched_ranges_, stitched_chunks_, touched_, kept_;
  int refused_ = 0;
  std::uint64_t gone_bytes_ = 0, returned_bytes_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Packs models into a pool's chunks and measures how well"};
  settings how;
  app.add_option("--packer", how.packer, "tensors, models or heap");
  app.add_option("--occupancy-percent", how.occupancy_percent);
  app.add_option("--pool-bytes", how.pool_bytes);
  app.add_option("--chunk-bytes", how.chunk_bytes);
  app.add_option("--models", how.models);
  app.add_option("--operations", how.operations);
  app.add_option("--zipf", how.zipf, "exponent of the popularity distribution");
  app.add_option("--seed", how.seed);
  CLI11_PARSE(app, argc, argv);
  try {
    std::printf("%s\n", server{how}.run().dump().c_str());
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-packing: %s\n", why.what());
    return 1;
  }
}
