//! Compiles the `.proto` file with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/inference.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .build_client(false)
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
