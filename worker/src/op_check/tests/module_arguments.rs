//! Arguments of convolutions, pools and sequences that kernels do not check, and the reason
//! for refusing each.

use burn_ir::*;

use super::*;

fn conv(x: TensorIr, weight: TensorIr, options: Conv2dOptionsIr, out: TensorIr) -> OperationIr {
    OperationIr::Module(ModuleOperationIr::Conv2d(Conv2dOpIr {
        x,
        weight,
        bias: None,
        options,
        out: as_output(out),
    }))
}

#[test]
fn convolutions() {
    let options = || Conv2dOptionsIr {
        stride: [1; 2],
        padding: [(0, 0); 2],
        dilation: [1; 2],
        groups: 1,
    };
    let x = || float([1, 2, 5, 5]);
    let w = || float([3, 2, 3, 3]);
    let out = || float([1, 3, 3, 3]);
    assert_accepted(&conv(x(), w(), options(), out()));
    // Flex multiplies through unchecked pointers, as many as the weight has channels.
    assert_refused_with(
        conv(x(), float([3, 200, 3, 3]), options(), out()),
        "does not fit an input [1, 2, 5, 5]",
    );
    assert_refused_with(
        conv(x(), float([3, 2, 7, 3]), options(), out()),
        "a kernel that spans 7 does not fit an axis of 5",
    );
    assert_refused_with(
        conv(x(), float([3, 2, 0, 3]), options(), out()),
        "a kernel of 0",
    );
    let bad = |change: fn(&mut Conv2dOptionsIr)| {
        let mut options = options();
        change(&mut options);
        conv(x(), w(), options, out())
    };
    assert_refused_with(bad(|o| o.stride[1] = 0), "a stride of 0");
    assert_refused_with(bad(|o| o.dilation[0] = 0), "a dilation of 0");
    assert_refused_with(bad(|o| o.groups = 0), "in 0 groups");
    assert_refused_with(bad(|o| o.groups = usize::MAX), "cannot be addressed");
    assert_refused_with(bad(|o| o.dilation[0] = usize::MAX), "cannot be addressed");
    assert_refused_with(
        bad(|o| o.padding[0] = (usize::MAX, 1)),
        "cannot be addressed",
    );
    assert_refused_with(bad(|o| o.padding[0].1 = 1), "the op makes [1, 3, 4, 3]");
    // CubeCL takes these as 32 bits, also where they make no difference.
    let one = || float([1, 1, 1, 1]);
    let bad = |change: fn(&mut Conv2dOptionsIr)| {
        let mut options = options();
        change(&mut options);
        conv(one(), one(), options, one())
    };
    assert_accepted(&bad(|o| o.stride[0] = i32::MAX as usize));
    assert_refused_with(bad(|o| o.stride[0] = 1 << 31), "a stride of 2147483648");
    assert_refused_with(bad(|o| o.dilation[1] = 1 << 32), "a dilation of 4294967296");
    let long = conv(
        float([1, 1, 1, 1 << 31]),
        one(),
        Conv2dOptionsIr {
            stride: [1, 1 << 30],
            ..options()
        },
        float([1, 1, 1, 2]),
    );
    assert_refused_with(long, "a padded axis of 2147483648");
    // A kernel would loop over the groups for hours, although there is nothing to compute.
    let grad = Conv1dWeightBackwardOpIr {
        x: float([0, 1 << 30, 1]),
        weight: float([0, 1, 1]),
        output_grad: float([0, 0, 1]),
        options: Conv1dOptionsIr {
            stride: [1],
            padding: [(0, 0)],
            dilation: [1],
            groups: 1 << 30,
        },
        out: as_output(float([0, 1, 1])),
    };
    assert_refused_with(
        OperationIr::Module(ModuleOperationIr::Conv1dWeightBackward(grad)),
        "in 1073741824 groups",
    );
    // Computing the gradient of a kernel that slides far over padding takes much memory.
    let grad = Conv2dWeightBackwardOpIr {
        x: x(),
        weight: w(),
        output_grad: float([1, 3, 1, 1]),
        options: Conv2dOptionsIr {
            stride: [i32::MAX as usize; 2],
            padding: [(1 << 29, 1 << 29); 2],
            ..options()
        },
        out: as_output(w()),
    };
    let grad = OperationIr::Module(ModuleOperationIr::Conv2dWeightBackward(grad));
    assert!(
        assert_accepted(&grad) > 1 << 60,
        "{}",
        assert_accepted(&grad)
    );
}

#[test]
fn transposed_convolutions() {
    let op = |padding, padding_out, groups, out| {
        OperationIr::Module(ModuleOperationIr::ConvTranspose1d(ConvTranspose1dOpIr {
            x: float([1, 4, 5]),
            weight: float([4, 3, 3]),
            bias: None,
            options: ConvTranspose1dOptionsIr {
                stride: [2],
                padding: [padding],
                padding_out: [padding_out],
                dilation: [1],
                groups,
            },
            out: as_output(out),
        }))
    };
    assert_accepted(&op(1, 1, 2, float([1, 6, 10])));
    assert_refused_with(
        op(9, 0, 1, float([1, 3, 1])),
        "a padding of 9 is too large for an axis of 11",
    );
    assert_refused_with(
        op(usize::MAX, 0, 1, float([1, 3, 1])),
        "cannot be addressed",
    );
    assert_refused_with(
        op(0, usize::MAX, 1, float([1, 3, 1])),
        "cannot be addressed",
    );
    assert_refused_with(op(0, 0, 3, float([1, 9, 11])), "in 3 groups");
    let one = |stride, padding_out| ConvTranspose1dOpIr {
        x: float([1, 1, 1]),
        weight: float([1, 1, 1]),
        bias: None,
        options: ConvTranspose1dOptionsIr {
            stride: [stride],
            padding: [0],
            padding_out: [padding_out],
            dilation: [1],
            groups: 1,
        },
        out: as_output(float([1, 1, 1 + padding_out])),
    };
    let transposed = |op| OperationIr::Module(ModuleOperationIr::ConvTranspose1d(op));
    assert_accepted(&transposed(one(i32::MAX as usize, 0)));
    assert_refused_with(transposed(one(1 << 32, 0)), "a stride of 4294967296");
    assert_refused_with(
        transposed(one(1, i32::MAX as usize)),
        "a whole axis of 2147483648",
    );
    let empty = ConvTranspose1dOpIr {
        x: float([0, 0, 5]),
        weight: float([0, 0, 3]),
        bias: None,
        options: ConvTranspose1dOptionsIr {
            stride: [1],
            padding: [0],
            padding_out: [0],
            dilation: [1],
            groups: 2,
        },
        out: as_output(float([0, 0, 7])),
    };
    assert_refused_with(
        OperationIr::Module(ModuleOperationIr::ConvTranspose1d(empty)),
        "in 2 groups",
    );
}

#[test]
fn pools() {
    let pool = |kernel_size, stride, padding, out| {
        OperationIr::Module(ModuleOperationIr::AvgPool1d(AvgPool1dOpIr {
            x: float([1, 2, 5]),
            kernel_size,
            stride,
            padding,
            count_include_pad: true,
            ceil_mode: false,
            out: as_output(out),
        }))
    };
    assert_refused_with(pool(0, 1, 0, float([1, 2, 5])), "a kernel of 0");
    assert_refused_with(pool(2, 0, 0, float([1, 2, 5])), "a stride of 0");
    assert_refused_with(
        pool(6, 1, 0, float([1, 2, 0])),
        "a window of 6 does not fit an axis of 5",
    );
    assert_refused_with(
        pool(2, 1, usize::MAX / 2, float([1, 2, 5])),
        "cannot be addressed",
    );
    assert_refused_with(
        pool(5, 1 << 31, 0, float([1, 2, 1])),
        "a stride of 2147483648",
    );
    // Small tensors, but a loop that takes practically forever.
    let backward = AvgPool1dBackwardOpIr {
        x: float([1, 200, 5]),
        grad: float([1, 200, 6]),
        kernel_size: 1 << 30,
        stride: 1,
        padding: 1 << 29,
        count_include_pad: true,
        ceil_mode: false,
        out: as_output(float([1, 200, 5])),
    };
    let backward = ModuleOperationIr::AvgPool1dBackward(backward);
    assert_refused_with(OperationIr::Module(backward), "windows of");
}

#[test]
fn sequences() {
    let attention = |key, value, mask| {
        let options = AttentionOptionsIr {
            scale: None,
            softcap: None,
            is_causal: false,
        };
        let query = float([2, 4, 5, 8]);
        OperationIr::Module(ModuleOperationIr::Attention(AttentionOpIr {
            query,
            key,
            value,
            mask,
            attn_bias: None,
            options,
            out: as_output(float([2, 4, 5, 6])),
        }))
    };
    let (key, value) = (|| float([2, 2, 7, 8]), || float([2, 2, 7, 6]));
    assert_accepted(&attention(key(), value(), None));
    assert_refused_with(
        attention(float([2, 3, 7, 8]), float([2, 3, 7, 6]), None),
        "a key [2, 3, 7, 8]",
    );
    assert_refused_with(
        attention(key(), float([2, 2, 9, 6]), None),
        "a value [2, 2, 9, 6]",
    );
    assert_refused_with(
        attention(key(), value(), Some(boolean([2, 1, 5, 6]))),
        "a mask [2, 1, 5, 6]",
    );
    assert_refused_with(
        attention(key(), value(), Some(int([2, 1, 5, 7]))),
        "must be Bool",
    );
    let ctc = |probs: TensorIr, blank| {
        let op = CtcLossOpIr::create(probs, int([2, 3]), int([2]), int([2]), blank, id);
        OperationIr::Module(ModuleOperationIr::CtcLoss(op))
    };
    assert_refused_with(ctc(float([7, 2, 5]), 5), "5 as blank");
    assert_refused_with(ctc(float([1 << 29, 2, 5]), 0), "steps");
    let unfold = Unfold4dOpIr {
        x: float([1, 2, 5, 5]),
        kernel_size: [1 << 40; 2],
        options: Unfold4dOptionsIr {
            stride: [1; 2],
            padding: [1 << 41; 2],
            dilation: [1; 2],
        },
        out: as_output(float([1, 1, 1])),
    };
    assert_refused_with(
        OperationIr::Module(ModuleOperationIr::Unfold4d(unfold)),
        "addressed",
    );
}

#[test]
fn kernels_of_deformable_convolutions_have_a_limit() {
    let op = |height| {
        let (rows, columns) = (64 - height + 1, 33);
        let op = DeformConv2dOpIr {
            x: float([1, 1, 64, 64]),
            offset: float([1, 2 * 32 * height, rows, columns]),
            weight: float([1, 1, height, 32]),
            mask: None,
            bias: None,
            options: DeformableConv2dOptionsIr {
                stride: [1, 1],
                padding: [0, 0],
                dilation: [1, 1],
                weight_groups: 1,
                offset_groups: 1,
            },
            out: as_output(float([1, 1, rows, columns])),
        };
        OperationIr::Module(ModuleOperationIr::DeformableConv2d(Box::new(op)))
    };
    assert_accepted(&op(32));
    assert_refused_with(op(33), "a kernel of 33 and 32 has more than 1024 elements");
}

#[test]
fn all_scores_of_an_attention_are_charged_on_a_gpu() {
    let attention = |scale| {
        let sequence = || float([2, 3, 1000, 8]);
        let op = AttentionOpIr {
            query: sequence(),
            key: sequence(),
            value: sequence(),
            mask: None,
            attn_bias: None,
            options: AttentionOptionsIr {
                scale,
                softcap: None,
                is_causal: false,
            },
            out: as_output(sequence()),
        };
        OperationIr::Module(ModuleOperationIr::Attention(op))
    };
    let scaled = attention(Some(ScalarIr::Float(1.0)));
    assert_accepted(&scaled);
    assert_eq!(
        super::super::additional_gpu_bytes(&scaled),
        3 * 4 * 6 * 1000 * 1000
    );
    if !tensord_backend::ARE_GPUS_EXACT {
        assert_eq!(super::super::additional_gpu_bytes(&attention(None)), 0);
    }
}
