// Op definitions and shape functions. The data operations are not stateful: TensorFlow runs stateful ops of a function
// strictly one after another. So that they are not folded as constants either, each has an input `guard`, which comes
// from a stateful op, one in each graph. join and the value ops are stateful as well.
#include "tensorflow_ops.h"

namespace hc::tensorflow {

namespace {

// Of what is reduced. What is moved is of any type for TensorFlow, whose attributes cannot name float8; mpi_ops.py
// refuses the types that are not in the table below.
constexpr const char* kReduced = "{bool, uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}";

constexpr struct {
  int type;  // TF_DataType
  hc_dtype dtype;
} kDataTypes[] = {{10, HC_BOOL},
                  {4, HC_UINT8},
                  {6, HC_INT8},
                  {17, HC_UINT16},
                  {5, HC_INT16},
                  {kTfInt32, HC_INT32},
                  {9, HC_INT64},
                  {19, HC_FLOAT16},
                  {14, HC_BFLOAT16},
                  {1, HC_FLOAT32},
                  {2, HC_FLOAT64},
                  {22, HC_UINT32},
                  {23, HC_UINT64},
                  {8, HC_COMPLEX64},
                  {18, HC_COMPLEX128},
                  {24, HC_FLOAT8_E5M2},
                  {25, HC_FLOAT8_E4M3FN},
                  {26, HC_FLOAT8_E4M3FNUZ},
                  {27, HC_FLOAT8_E4M3B11FNUZ},
                  {28, HC_FLOAT8_E5M2FNUZ}};

class Shape {
 public:
  explicit Shape(TF_ShapeHandle* handle = api.NewShapeHandle()) : handle_(handle) {}
  ~Shape() { api.DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

int outputs_of(TF_ShapeInferenceContext* ctx) {  // all inputs but the guard
  return static_cast<int>(api.ShapeInferenceContextNumInputs(ctx)) - 1;
}

void same_shapes(TF_ShapeInferenceContext* ctx, TF_Status* status) {
  for (int i = 0; i < outputs_of(ctx) && api.GetCode(status) == kTfOk; ++i) {
    Shape shape;
    api.ShapeInferenceContextGetInput(ctx, i, shape, status);
    if (api.GetCode(status) == kTfOk) api.ShapeInferenceContextSetOutput(ctx, i, shape, status);
  }
}

// Output i has input i's shape with an unknown first dimension.
void other_rows(TF_ShapeInferenceContext* ctx, int i, TF_Status* status) {
  Shape input;
  api.ShapeInferenceContextGetInput(ctx, i, input, status);
  if (api.GetCode(status) != kTfOk) return;
  if (!api.ShapeInferenceContextRankKnown(ctx, input) || api.ShapeInferenceContextRank(ctx, input) == 0)
    return;  // a scalar is refused when the op runs
  Shape rows(api.ShapeInferenceContextVectorFromSize(ctx, static_cast<size_t>(-1))), row, output;
  api.ShapeInferenceContextSubshape(ctx, input, 1, INT64_MAX, row, status);
  if (api.GetCode(status) == kTfOk) api.ShapeInferenceContextConcatenateShapes(ctx, rows, row, output, status);
  if (api.GetCode(status) == kTfOk) api.ShapeInferenceContextSetOutput(ctx, i, output, status);
}

void rows_shapes(TF_ShapeInferenceContext* ctx, TF_Status* status) {
  api.ShapeInferenceContextSetUnknownShape(ctx, status);
  for (int i = 0; i < outputs_of(ctx) && api.GetCode(status) == kTfOk; ++i) other_rows(ctx, i, status);
}

void alltoall_shapes(TF_ShapeInferenceContext* ctx, TF_Status* status) {
  api.ShapeInferenceContextSetUnknownShape(ctx, status);
  if (api.GetCode(status) == kTfOk) other_rows(ctx, 0, status);
  Shape received(api.ShapeInferenceContextVectorFromSize(ctx, static_cast<size_t>(-1)));
  if (api.GetCode(status) == kTfOk) api.ShapeInferenceContextSetOutput(ctx, 1, received, status);
}

void scalar_shape(TF_ShapeInferenceContext* ctx, TF_Status* status) {
  Shape scalar(api.ShapeInferenceContextScalar(ctx));
  api.ShapeInferenceContextSetOutput(ctx, 0, scalar, status);
}

class Definition {
 public:
  explicit Definition(const char* type) : type_(type), builder_(api.NewOpDefinitionBuilder(type)) {}
  void input(const char* spec) { api.OpDefinitionBuilderAddInput(builder_, spec); }
  void output(const std::string& spec) { api.OpDefinitionBuilderAddOutput(builder_, spec.c_str()); }
  void attribute(const std::string& spec) { api.OpDefinitionBuilderAddAttr(builder_, spec.c_str()); }
  void stateful() { api.OpDefinitionBuilderSetIsStateful(builder_, true); }
  std::string finish(ShapeFunction shapes) {
    api.OpDefinitionBuilderSetShapeInferenceFunction(builder_, shapes);
    Outcome outcome;
    api.RegisterOpDefinition(builder_, outcome);
    return outcome.ok() ? "" : std::string(type_) + ": " + outcome.text();
  }

 private:
  const char* type_;
  TF_OpDefinitionBuilder* builder_;  // RegisterOpDefinition frees it
};

std::string define(const OpSpec& spec) {
  Definition op(spec.type);
  if (spec.op == HC_JOIN) {
    op.stateful();
    op.output(std::string(spec.output) + ": int32");
    op.attribute("tensor_name: string = ''");
    return op.finish(scalar_shape);
  }
  op.input(spec.grouped ? "tensors: T" : "tensor: T");
  if (spec.op == HC_ALLTOALL) op.input("splits: int32");
  op.input("guard: int32");
  op.output(std::string(spec.output) + ": T");
  if (spec.op == HC_ALLTOALL) op.output("received_splits: int32");
  const std::string types = spec.reduces ? kReduced : "type";
  op.attribute(spec.grouped ? "T: list(" + types + ") >= 1" : "T: " + types);
  op.attribute("tensor_name: string = ''");
  op.attribute("ignore_name_scope: bool = false");
  op.attribute("process_set_id: int = 0");
  if (spec.op == HC_BROADCAST) op.attribute("root_rank: int");
  if (spec.reduces) {
    op.attribute("reduce_op: int");
    op.attribute("prescale_factor: string = '1'");  // text, as TensorFlow's float attributes have 32 bits
    op.attribute("postscale_factor: string = '1'");
  }
  if (spec.op == HC_ALLTOALL) return op.finish(alltoall_shapes);
  return op.finish(spec.result == Result::kRows ? rows_shapes : same_shapes);
}

std::string define(const ValueSpec& spec) {
  Definition op(spec.type);
  op.stateful();
  op.output(std::string(spec.output) + ": int32");
  if (spec.of_process_set) op.attribute("process_set_id: int = 0");
  return op.finish(scalar_shape);
}

}  // namespace

int32_t dtype_of(int type) {
  for (const auto& known : kDataTypes)
    if (known.type == type) return known.dtype;
  return -1;
}

std::string register_ops() {
  for (const OpSpec& spec : kCollectives)
    if (std::string problem = define(spec); !problem.empty()) return problem;
  for (const ValueSpec& spec : kValues)
    if (std::string problem = define(spec); !problem.empty()) return problem;
  return "";
}

}  // namespace hc::tensorflow
