// A button on each block of code. What it copies can be run: without prompts, and without what was printed.
function codeOf(block) {
    const lines = block.textContent.replace(/\n$/, "").split("\n");
    if (!lines.some(line => line.startsWith(">>> "))) {
        return lines.join("\n") + "\n";
    }
    return lines.filter(line => /^(>>>|\.\.\.)( |$)/.test(line)).map(line => line.slice(4)).join("\n") + "\n";
}

for (const block of document.querySelectorAll("main .pdoc-code > pre")) {
    const button = document.createElement("button");
    button.className = "copy pdoc-button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(codeOf(block));
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.parentElement.append(button);
}
