/// However a micro-batch loses its memory, it runs again, and nothing of the lost try is left.
#include <gmock/gmock.h>

#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>

#include "tests/runtime/torch_step/shared_training.hpp"

using namespace sluice::testing;
using sluice::step;

namespace {

constexpr int batches = 3;
constexpr std::int64_t samples = 12, micro_batch = 5;

void revoke() {
  the_script().arena_state = SLUICE_ARENA_REVOKED;
}

/// How a try ends whose memory goes, with the slice's loss and what the model has computed.
using mishap = std::function<void(torch::Tensor& loss, torch::Tensor const& output)>;

struct way {
  char const* name;
  mishap happens;

  friend void PrintTo(way const& of, std::ostream* out) { *out << of.name; }
};

/// What is trained, with the random state in the end, if the try with this number (from 0, none if
/// negative; the first is the rehearsal) ends with a mishap.
std::vector<torch::Tensor> trained(int disturbed, mishap const& happens,
                                   sluice::step_stats* stats = nullptr) {
  torch::manual_seed(0);
  auto own = at::make_generator<at::CPUGeneratorImpl>(5);
  auto model = restless_mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer, {.micro_batch = micro_batch, .generators = {own}}};
  std::vector<torch::Tensor> losses;
  int tries = 0;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> lost;
  auto loss_of = [&](step::tensors const& slices) {
    EXPECT_TRUE(!lost || lost->expired());
    auto const noise = torch::rand({slices[0].size(0), 1}, own);
    auto const output = torch::log_softmax(model->forward(slices[0] + noise), 1);
    auto loss = F::nll_loss(output, slices[1]);
    if (tries++ == disturbed) {
      lost = output.storage().getWeakStorageImpl();  // backward needs it
      happens(loss, output);
    }
    return loss;
  };
  for (int batch = 0; batch < batches; ++batch) {
    losses.push_back(step(loss_of, batch_of(samples, static_cast<std::uint64_t>(batch))));
  }
  if (stats != nullptr) {
    *stats = step.stats();
  }
  auto result = weights_of(*model);
  result.insert(result.end(), losses.begin(), losses.end());
  result.push_back(torch::rand({1}));
  result.push_back(torch::rand({1}, own));
  return result;
}

class torch_step_discard : public shared_training, public ::testing::WithParamInterface<way> {};

way const ways[] = {
    {"forward_ends_as_if_nothing_were", [](auto& /*loss*/, auto const& /*output*/) { revoke(); }},
    {"forward_throws",
     [](auto& /*loss*/, auto const& /*output*/) {
       revoke();
       throw std::runtime_error{"whatever torch makes of it"};
     }},
    {"forward_throws_what_is_no_exception",
     [](auto& /*loss*/, auto const& /*output*/) {
       revoke();
       throw 42;
     }},
    {"forward_returns_garbage",
     [](auto& loss, auto const& /*output*/) {
       revoke();
       loss = torch::full({2}, 1);
     }},
    {"backward_ends_as_if_nothing_were",
     [](auto& /*loss*/, auto const& output) {
       output.register_hook([](torch::Tensor const& /*gradient*/) { revoke(); });
     }},
    {"backward_throws",
     [](auto& loss, auto const& output) {
       auto const branch = output * 1;
       loss = loss + branch.sum();
       // The loss's own node is ready when this one throws.
       branch.register_hook([](torch::Tensor const& /*gradient*/) -> void {
         revoke();
         throw std::runtime_error{"whatever torch makes of it"};
       });
     }},
    {"the_arena_was_too_small",
     [](auto& /*loss*/, auto const& /*output*/) {
       the_script().arena_state = SLUICE_ARENA_STARVED;
       throw std::bad_alloc{};
     }},
    {"the_commit_is_refused",
     [](auto& /*loss*/, auto const& /*output*/) { the_script().commits_refused = 1; }},
    {"three_times_in_a_row",
     [](auto& /*loss*/, auto const& /*output*/) { the_script().commits_refused = 3; }},
};

TEST_P(torch_step_discard, at_any_slice_leaves_every_bit_as_it_would_have_been) {
  auto const expected = trained(-1, {});
  int const tries = 1 + 3 * batches;
  for (int disturbed = 1; disturbed < tries; ++disturbed) {
    sluice::step_stats stats;
    EXPECT_TRUE(same_bits(trained(disturbed, GetParam().happens, &stats), expected)) << disturbed;
    EXPECT_EQ(stats.discards, std::string{GetParam().name} == "three_times_in_a_row" ? 3 : 1);
    EXPECT_EQ(stats.commits, 3 * batches);
    EXPECT_EQ(stats.samples, samples * batches);
    EXPECT_EQ(stats.discarded_seconds, 1.5);
  }
}

INSTANTIATE_TEST_SUITE_P(ways, torch_step_discard, ::testing::ValuesIn(ways),
                         [](auto const& test) { return test.param.name; });

}  // namespace
