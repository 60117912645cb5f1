#include "runtime/torch/model/detail/code_effects.hpp"

#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/peephole.h>

#include <exception>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "runtime/server/hosting/torch_errors.hpp"

namespace sluice::server::detail {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;
namespace prim = torch::jit::prim;

void for_each_node(Block* block, std::function<void(Node*)> const& what) {
  for (auto* const node : block->nodes()) {
    what(node);
    for (auto* const inner : node->blocks()) {
      for_each_node(inner, what);
    }
  }
}

/// That the code of nothing else says.
bool is_opaque(Node const* node) {
  switch (node->kind()) {
    case prim::CallMethod:
    case prim::CallFunction:
    case prim::fork:
    case prim::awaitable:
    case prim::PythonOp:
    case prim::CreateObject:
      return true;
    default:
      return false;
  }
}

bool is_plain(c10::IValue const& value) {
  return value.isInt() || value.isDouble() || value.isBool() || value.isString() || value.isNone();
}

/// Puts attributes that never change into the code as constants, so that what they decide is decided.
void insert_attributes(torch::jit::Graph& graph, torch::jit::Module const& module) {
  std::unordered_map<Value const*, c10::intrusive_ptr<c10::ivalue::Object>> objects;
  objects.emplace(graph.inputs().at(0), module._ivalue());
  std::vector<Node*> replaced;
  for_each_node(graph.block(), [&](Node* node) {
    auto const of = node->kind() == prim::GetAttr ? objects.find(node->input()) : objects.end();
    if (of == objects.end()) {
      return;
    }
    auto const value = of->second->getAttr(node->s(torch::jit::attr::name));
    if (value.isObject()) {
      objects.emplace(node->output(), value.toObject());
    } else if (is_plain(value)) {
      torch::jit::WithInsertPoint const here{node};
      if (auto const constant = torch::jit::tryInsertConstant(graph, value)) {
        node->output()->replaceAllUsesWith(*constant);
        replaced.push_back(node);
      }
    }
  });
  for (auto* const node : replaced) {
    node->destroy();
  }
}

}  // namespace

std::optional<std::string> lasting_effect_of(torch::jit::Module const& module) try {
  auto graph = module.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  std::optional<std::string> effect;
  for_each_node(graph->block(), [&](Node const* node) {
    if (node->kind() == prim::SetAttr) {
      effect = c10::str("it assigns to '", node->s(torch::jit::attr::name), "'");
    }
  });
  if (effect) {
    return effect;
  }
  insert_attributes(*graph, module);
  constexpr int rounds = 2;  // what is decided may decide more
  for (int i = 0; i < rounds; ++i) {
    torch::jit::ConstantPropagation(graph);
    torch::jit::PeepholeOptimize(graph);
  }
  torch::jit::EliminateDeadCode(graph);
  torch::jit::AliasDb const aliases{graph};
  for_each_node(graph->block(), [&](Node const* node) {
    if (is_opaque(node)) {
      effect = c10::str("it calls what its code does not show, ", node->kind().toDisplayString());
    } else if (node->kind() == prim::GetAttr && aliases.hasWriters(node->output())) {
      effect = c10::str("it may write into '", node->s(torch::jit::attr::name), "'");
    }
  });
  return effect;
} catch (std::exception const& failure) {
  return c10::str("its code cannot be looked through: ", first_line(failure.what()));
}

}  // namespace sluice::server::detail
